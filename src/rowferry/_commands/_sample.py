"""Read a few random rows, alone and together, and tell what they cost."""

from __future__ import annotations

import math
import mmap
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowferry.stores import MemmapStore, Store, ZarrStore
from rowferry.stores._npy import MOST_HEADER_BYTES, NpyHeader, parse_header

ALONE_ROWS = 64
WINDOW_ROWS = 4096
WINDOW_BYTES = 64 << 20  # a window of large rows is made smaller, so that a sample stays a sample
ALONE_SECONDS = 1.0  # a slow store is sampled with fewer rows


class RowCost(NamedTuple):
    """What a random row costs, a mean over a sample; whatever the page cache holds is read from there.

    ``alone_*``: rows read one by one, as a loop without prefetch does. ``window_*``: distinct rows, sorted and read
    in one call, as the pipeline does. ``*_bytes``: bytes read from the file a row, None where the system does not
    tell. ``window_decoded``: rows decoded for a row used.
    """

    alone_rows: int
    alone_microseconds: float
    alone_bytes: float | None
    window_rows: int
    window_microseconds: float
    window_bytes: float | None
    window_decoded: float


def row_cost(store: Store, seed: int = 0) -> RowCost | None:
    """Read a seeded sample of rows; None when there are none to read."""
    total = len(store)
    if not total:
        return None
    rng = np.random.default_rng(seed)
    alone = rng.integers(0, total, min(ALONE_ROWS, total))
    most = max(min(WINDOW_ROWS, WINDOW_BYTES // max(store.row_nbytes * store.chunk_rows, 1)), 1)
    window = np.unique(rng.integers(0, total, min(most, total)))
    store.gather(alone[:1])  # what is set up at the first read is not a row's cost
    before, start = _bytes_read(store), time.perf_counter()
    alone_read = _read_alone(store, alone, start + ALONE_SECONDS)
    between, middle = time.perf_counter(), _bytes_read(store)
    store.gather(window)
    end, after = time.perf_counter(), _bytes_read(store)
    mapped = _mapped_place(store)
    return RowCost(
        alone_rows=alone_read,
        alone_microseconds=(between - start) * 1e6 / alone_read,
        alone_bytes=_mapped_bytes(*mapped, alone, once=False) if mapped else _each(before, middle, alone_read),
        window_rows=len(window),
        window_microseconds=(end - between) * 1e6 / len(window),
        window_bytes=_mapped_bytes(*mapped, window, once=True) if mapped else _each(middle, after, len(window)),
        window_decoded=len(np.unique(window // store.chunk_rows)) * store.chunk_rows / len(window),
    )


def _read_alone(store: Store, rows: NDArray[np.int64], deadline: float) -> int:
    """Read row by row until the deadline; the number of rows read, at least one."""
    for done, row in enumerate(rows, start=1):
        store.gather([int(row)])
        if time.perf_counter() > deadline:
            return done
    return len(rows)


def npy_header(store: MemmapStore) -> NpyHeader:
    """The header of the file that a store maps."""
    with open(store.name, "rb") as file:
        return parse_header(file.read(MOST_HEADER_BYTES), store.dtype, store.name)


def _mapped_place(store: Store) -> tuple[int, int, int, int] | None:
    """How rows lie in mapped memory: parts of a row that lie apart, bytes of each, where they start, bytes of the whole.

    None for rows that are read otherwise. Chunks of a zarr count as if they followed one another.
    """
    if store.remote:
        return None
    if isinstance(store, ZarrStore):
        return (1, store.row_nbytes, 0, store.nbytes) if store.chunk_rows == 1 and store.block_rows > 1 else None
    if not isinstance(store, MemmapStore):
        return None
    header = npy_header(store)
    items = math.prod(header.shape[1:])
    parts, nbytes = (items, header.stored.itemsize) if header.fortran else (1, items * header.stored.itemsize)
    return parts, nbytes, header.offset, header.offset + header.nbytes


def _mapped_bytes(parts: int, nbytes: int, offset: int, total: int, rows: NDArray[np.int64], *, once: bool) -> float:
    """Bytes a row that a mapped file brings in: whole pages; with ``once``, a page that sorted rows share counts once.

    Reads of a map are no system calls that could be counted. In Fortran order every element of a row lies in a part
    of the file of its own.
    """
    if not nbytes or not parts:
        return 0.0
    starts = rows * nbytes + offset
    first, last = starts // mmap.PAGESIZE, (starts + nbytes - 1) // mmap.PAGESIZE
    pages = int((last - first + 1).sum())
    if once:
        pages -= int(np.count_nonzero(first[1:] <= last[:-1]))
    all_pages = -(-total // mmap.PAGESIZE)
    most = all_pages if once else all_pages * len(rows)
    return min(pages * parts, most) * mmap.PAGESIZE / len(rows)


def _bytes_read(store: Store) -> int | None:
    """Bytes that this process has read by system calls so far, from the page cache or not; None where nobody may know, and
    for a store whose rows come from elsewhere."""
    if store.remote:
        return None
    try:
        counters = Path("/proc/self/io").read_text("ascii")
    except (FileNotFoundError, PermissionError):
        return None
    return int(dict(line.split(": ", 1) for line in counters.splitlines())["rchar"])


def _each(before: int | None, after: int | None, rows: int) -> float | None:
    return None if before is None or after is None else (after - before) / rows
