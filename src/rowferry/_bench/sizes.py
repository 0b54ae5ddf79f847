"""How large a measurement is: what fits in memory and in time, and what was made smaller for it.

Pure, but for ``pace`` and ``filling``, which find out what a machine does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rowferry.stores import Store

from .clock import clock
from .workloads import ring_length

ROW_BYTES = 512
TABLE_BYTES, QUICK_TABLE_BYTES = 16 << 30, 2 << 30
BATCH_BYTES, CPU_BATCH_BYTES = 64 << 20, 4 << 20
MOST_BATCH = 131_072

_HOST_SHARE, _USUAL_SHARE = 0.6, 0.25  # of available memory, for a table as asked for and for a usual one
_FILLING, _USUAL_FILLING = 0.4, 0.1  # of the time, for making it
_PROBE_BYTES = 256 << 20
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


class Room(NamedTuple):
    """What sizes must fit in.

    Attributes:
        host_free, device_free: bytes.
        filled: bytes of a table that are made in a second.
        seconds: of the whole measurement.
        quick: usual tables are smaller.
    """

    host_free: int
    device_free: int
    on_gpu: bool
    filled: float
    seconds: float
    quick: bool


def fit(rows: int | None, row_bytes: int, batch: int | None, room: Room) -> Sizes:
    """Sizes of a table that is to be made and of batches of it; None takes what is usual, or less where that does not fit.

    Raises:
        ValueError: a size below one, or ``rows`` that take too long to make. MemoryError: ``rows`` or ``batch``, as given, do
        not fit. The message says what would.
    """
    for name, value in (("--rows", rows), ("--row-bytes", row_bytes), ("--batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    notes = []
    if rows is None:
        usual = max((QUICK_TABLE_BYTES if room.quick else TABLE_BYTES) // row_bytes, 1)
        held = int(room.host_free * _USUAL_SHARE)
        made = int(room.filled * room.seconds * _USUAL_FILLING)
        rows = max(min(usual, held // row_bytes, made // row_bytes), 1)
        if rows < usual:
            why = f"{room.host_free:,} bytes of memory are available" if held < made else f"{made:,} bytes are made in the time"
            notes.append(f"{why}: a table of {rows:,} rows in place of {usual:,}")
    else:
        _require_room(rows, row_bytes, room)
    batch, batch_notes = fit_batch(batch, row_bytes, device_free=room.device_free, on_gpu=room.on_gpu)
    return Sizes(rows, row_bytes, batch, (*notes, *batch_notes))


def _require_room(rows: int, row_bytes: int, room: Room) -> None:
    most = max(int(room.host_free * _HOST_SHARE) // row_bytes, 1)
    if rows > most:
        raise MemoryError(
            f"{rows:,} rows of {row_bytes:,} bytes take {rows * row_bytes:,} bytes, and {room.host_free:,} bytes of host "
            f"memory are available, of which {_HOST_SHARE:.0%} may be used; pass --rows {most} or fewer"
        )
    took = rows * row_bytes / room.filled
    if took > room.seconds * _FILLING:
        most = max(int(room.filled * room.seconds * _FILLING) // row_bytes, 1)
        raise ValueError(
            f"{rows:,} rows of {row_bytes:,} bytes take about {took:.0f} of {room.seconds:.0f} s to make here; pass "
            f"--rows {most} or fewer, or --seconds {took / _FILLING + 1:.0f} or more"
        )


def filling(make: Callable[[int], Store], row_bytes: int, most_bytes: int) -> float:
    """Bytes a second of a table that ``make(rows)`` makes, from a small one. A GPU must have been used before."""
    rows = max(min(_PROBE_BYTES, most_bytes) // row_bytes, 1)
    start = clock()
    with make(rows):
        return rows * row_bytes / max(clock() - start, 1e-9)


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
