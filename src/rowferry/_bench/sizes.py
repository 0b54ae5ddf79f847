"""How large a measurement is: what fits in memory and in time, and what was made smaller for it. Pure, but for ``pace``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rowferry.stores import Store

from .clock import clock
from .workloads import ring_length

ROW_BYTES = 512
TABLE_BYTES, QUICK_TABLE_BYTES = 16 << 30, 2 << 30
BATCH_BYTES, CPU_BATCH_BYTES = 64 << 20, 4 << 20
MOST_BATCH = 131_072

_HOST_SHARE = 0.6  # of available memory for the table; the rest is for index batches, pinned pieces and everyone else
_DEVICE_BATCHES = 8  # a batch, its slot's share, what peers and compute hold: so many batches must fit the device
_RING_BYTES = 256 << 20
_SLOT_BATCHES = 8
_SMALL_BATCH = 128 << 20  # the default staging holds several batches of that


class Sizes(NamedTuple):
    """Of a measurement, and a line for each that was made smaller than asked or usual."""

    rows: int
    row_bytes: int
    batch: int
    notes: tuple[str, ...]

    @property
    def batch_bytes(self) -> int:
        return self.batch * self.row_bytes

    def ring(self, most: int | None = None) -> int:
        """Index batches to draw: as many as windows need, at most ``most``, of some 256 MiB in all."""
        wanted = ring_length(self.batch) if most is None else most
        return max(min(wanted, _RING_BYTES // (8 * self.batch)), 4)

    def staging(self) -> dict[str, int]:
        """The pipeline's ``staging_bytes`` where a batch is too large for the default."""
        return {"staging_bytes": 2 * _SLOT_BATCHES * self.batch_bytes} if self.batch_bytes > _SMALL_BATCH else {}


def fit(
    rows: int | None, row_bytes: int, batch: int | None, *, host_free: int, device_free: int, on_gpu: bool, quick: bool
) -> Sizes:
    """Sizes of a table that is to be made and of batches of it; None takes what is usual.

    Raises:
        ValueError: a size below one. MemoryError: ``rows`` or ``batch``, as given, do not fit; the message says what would.
    """
    for name, value in (("--rows", rows), ("--row-bytes", row_bytes), ("--batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    notes = []
    most_rows = max(int(host_free * _HOST_SHARE) // row_bytes, 1)
    if rows is None:
        usual = max((QUICK_TABLE_BYTES if quick else TABLE_BYTES) // row_bytes, 1)
        rows = min(usual, most_rows)
        if rows < usual:
            notes.append(f"{host_free:,} bytes of memory are available: a table of {rows:,} rows in place of {usual:,}")
    elif rows > most_rows:
        raise MemoryError(
            f"{rows:,} rows of {row_bytes:,} bytes take {rows * row_bytes:,} bytes, and {host_free:,} bytes of host memory are "
            f"available, of which {_HOST_SHARE:.0%} may be used; pass --rows {most_rows} or fewer"
        )
    batch, batch_notes = fit_batch(batch, row_bytes, device_free=device_free, on_gpu=on_gpu)
    return Sizes(rows, row_bytes, batch, (*notes, *batch_notes))


def fit_batch(batch: int | None, row_bytes: int, *, device_free: int, on_gpu: bool) -> tuple[int, tuple[str, ...]]:
    """Rows a batch, and lines about it. Raises as ``fit``."""
    most = max(device_free // _DEVICE_BATCHES // row_bytes, 1)
    if batch is None:
        usual = max(min(MOST_BATCH, (BATCH_BYTES if on_gpu else CPU_BATCH_BYTES) // row_bytes), 1)
        batch = min(usual, most)
        short = f"{device_free:,} bytes are free on the device: batches of {batch:,} rows in place of {usual:,}"
        return batch, (short,) if batch < usual else ()
    if batch > most:
        raise MemoryError(
            f"{batch:,} rows of {row_bytes:,} bytes are {batch * row_bytes:,} bytes a batch, and {device_free:,} bytes are "
            f"free on the device, which must hold {_DEVICE_BATCHES} of them; pass --batch {most} or fewer"
        )
    return batch, ()


def pace(store: Store, batch: int, most_seconds: float) -> tuple[int, tuple[str, ...]]:
    """``batch``, or fewer rows where reading so many takes longer than ``most_seconds`` here, and a line about it.

    Reads some rows: ever more, until that takes long enough to tell.
    """
    rng = np.random.default_rng(0)
    rows = min(16, batch)
    while True:
        index = rng.integers(0, len(store), rows)
        start = clock()
        store.gather(index)
        seconds = clock() - start
        if seconds > most_seconds / 8 or rows >= batch:
            break
        rows = min(4 * rows, batch)
    whole = seconds * batch / rows
    if whole <= most_seconds:
        return batch, ()
    fitting = max(int(rows * most_seconds / seconds), 1)
    return fitting, (f"a batch of {batch:,} rows takes {whole:.1f} s to read here: batches of {fitting:,} rows are measured",)
