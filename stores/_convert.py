"""All rows of a store into a file of another layout: by pieces, going on where a killed one stopped, compared at the end.

Guarantees:
- ``target`` appears whole and durable, or not at all; what is there already is never touched.
- Until then the rows are in a hidden file beside it, and a journal beside that says how many of them are durable.
- One conversion of a target at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from ._bytes import as_ints
from ._contract import Store
from ._files import lock_writer, publish, refuse_existing, sync_folder
from ._open import create_store, kind_of, open_store
from ._rows import pieces
from ._zarr import ZarrStore
from ._zarr_create import create_zarr

DURABLE_BYTES = 256 << 20  # after so many a record is made durable: what a kill costs at most
PIECE_BYTES = 64 << 20

Report = Callable[[Literal["copy", "compare"], int], None]
"""Told how many rows of a step are done, after each piece."""


@final
@dataclass(frozen=True)
class Layout:
    """Of a .zarr, as for ``create_store``; all None for a .npy."""

    chunks: int | None = None
    shards: int | Literal[False] | None = None
    compressor: Literal["zstd", "blosc"] | None = None


def convert(source: Store, target: str | os.PathLike[str], layout: Layout, report: Report) -> int:
    """Write all rows of ``source`` to ``target``, bit for bit, and compare them. The rows that an earlier run had done.

    A .zarr made from a .zarr keeps its attributes and names of dimensions. In pieces of at most 64 MiB, or one chunk
    (shard, when sharded) of the target.

    Raises:
        FileExistsError: ``target`` exists. BlockingIOError: another process converts to it.
        ValueError: a bad suffix or layout, or an unfinished conversion of something else is there.
        OSError: the disk is too full (what is done stays, for the next run), or a row that was read back differs.
    """
    kind, path = kind_of(target, new=True), Path(target)
    refuse_existing(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to put {path.name} into; make it first")
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    with _Journal(path.with_name(f".{path.name}.journal"), partial).open(_what(source, layout)) as journal:
        refuse_existing(path)  # again: another run may have ended since
        done = journal.done
        if not (done and os.path.lexists(partial)):
            done = 0
            _remove(partial)
            try:
                _create(partial, source, kind, layout).close()
            except BaseException:
                journal.remove()  # nothing is there that a later run could go on with
                raise
        with open_store(partial, "r+", dtype=source.dtype) as copy:
            _copy(source, copy, done, journal, report)
        with open_store(partial, dtype=source.dtype) as copy:
            _compare(source, copy, report)
        publish(partial, path)
        _remove(partial)  # a file has two names now
        journal.remove()
    return done


def _copy(source: Store, copy: Store, done: int, journal: _Journal, report: Report) -> None:
    report("copy", done)
    waiting = 0
    for first, last in pieces(len(source) - done, source.row_nbytes, PIECE_BYTES, copy.chunk_rows):
        start, stop = first + done, last + done
        copy.scatter(range(start, stop), source.gather(range(start, stop)))
        waiting += (stop - start) * source.row_nbytes
        if waiting >= DURABLE_BYTES or stop == len(source):
            copy.flush(sync=True)
            journal.record(stop)
            waiting = 0
        report("copy", stop)


def _compare(source: Store, copy: Store, report: Report) -> None:
    for start, stop in pieces(len(source), source.row_nbytes, PIECE_BYTES, max(copy.block_rows, copy.chunk_rows)):
        one, other = source.gather(range(start, stop)), copy.gather(range(start, stop))
        same = as_ints(one) == as_ints(other) if one.dtype.itemsize < 16 else _complex_bits(one) == _complex_bits(other)
        if not bool(same.all()):
            row = start + int(torch.nonzero(~same.reshape(stop - start, -1).all(dim=1))[0])
            raise OSError(
                errno.EIO,
                f"row {row} of {source.name} came back different from {copy.name}; the source changed meanwhile, or the "
                f"disk is broken. Remove {copy.name} and convert again",
            )
        report("compare", stop)


def _complex_bits(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values).view(torch.int64)


def _create(partial: Path, source: Store, kind: str, layout: Layout) -> Store:
    if kind == "zarr":
        like = source if isinstance(source, ZarrStore) else None
        return create_zarr(partial, source.shape, source.dtype, **asdict(layout), like=like)
    return create_store(partial, source.shape, source.dtype, **asdict(layout))


def _what(source: Store, layout: Layout) -> dict[str, Any]:
    """What a conversion is of: one that differs is another."""
    return {"source": source.name, "shape": list(source.shape), "dtype": str(source.dtype), **asdict(layout)}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@final
class _Journal:
    """A locked file: a line says what is converted, each later one how many rows are durable; a torn line is none."""

    def __init__(self, path: Path, partial: Path) -> None:
        self._path = path
        self._partial = partial
        self.done = 0

    @contextmanager
    def open(self, what: dict[str, Any]) -> Iterator[_Journal]:
        """Lock it, and read what an earlier run left."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            lock_writer(self._fd, self._path)
            lines = os.pread(self._fd, os.fstat(self._fd).st_size, 0).split(b"\n")[:-1]
            if lines and json.loads(lines[0]) != what:
                raise ValueError(
                    f"{self._partial} is an unfinished conversion of something else ({lines[0].decode()}); finish that one, "
                    f"or remove it and {self._path}"
                )
            if lines:
                self.done = max((int(line) for line in lines[1:]), default=0)
            else:
                os.ftruncate(self._fd, 0)
                self._append(json.dumps(what))
                sync_folder(self._path.parent)
            yield self
        finally:
            os.close(self._fd)

    def record(self, rows: int) -> None:
        """So many rows are durable."""
        self._append(str(rows))

    def remove(self) -> None:
        """The conversion is over."""
        self._path.unlink()

    def _append(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())
        os.fsync(self._fd)
