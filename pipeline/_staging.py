"""Owns memory that rows pass through: the slots' arenas on the device, and pinned buffers on the host."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowferry.stores._device_contract import Device, Event

from ._source import Source

ALIGN = 256  # bytes; columns of a slot start on a line that every vector width divides
DEFAULT_BYTES = 2 << 30
MOST_LENT = 64 << 20  # bytes of an arena that is lent: larger ones would not be found again where the CPU's memory waits


def default_staging(device: Device, source: Source, *, depth: int, writable: bool) -> int:
    """The smaller of 2 GiB and a tenth of what is free on the device; for small tables twice all their rows a slot.

    A window holds each row once, so a slot of all rows takes any number of batches; twice that, and the guess at the next
    window, which goes by the bytes of the last one, may still double.
    """
    rows = slot_bytes(source, [max(table.rows, 1) for table in source.tables], writable=writable)
    return min(DEFAULT_BYTES, device.free_bytes() // 10, 2 * depth * max(rows, ALIGN))


def slot_bytes(source: Source, rows: Sequence[int], *, writable: bool) -> int:
    """What a slot needs for ``rows`` distinct rows of each table, and their marks."""
    total = 0
    for table, count in zip(source.tables, rows, strict=True):
        for column in table.columns:
            total += _aligned(count * column.store.row_nbytes) + (_aligned(count) if writable else 0)
    return total


@dataclass(frozen=True)
class Carved:
    """One table's part of a slot: a tensor ``(d, *row_shape)`` a column, and its marks, uint8 ``(d,)``."""

    columns: tuple[Tensor, ...]
    marks: tuple[Tensor, ...]


@final
class Arenas:
    """``depth`` byte arenas on the device, allocated once; a window carves its columns out of one.

    Who calls it: the producer, after it claimed the slot. What ``carve`` returns is valid until the slot is claimed
    again; where ``lends``, for as long as somebody has it, for each window then has an arena of its own.

    Attributes:
        lends: batches are parts of an arena that the user has from then on: no row is in two windows, nor twice in one,
            and windows are laid out in the order asked for.
    """

    def __init__(self, device: Device, source: Source, *, depth: int, total: int, writable: bool, lends: bool = False) -> None:
        self.slot_bytes = total // depth // ALIGN * ALIGN
        self.depth = depth
        self._source = source
        self._writable = writable
        self._device = device
        self.lends = lends and self.slot_bytes <= MOST_LENT
        smallest = self.needed([1 for _ in source.tables])
        if self.slot_bytes < smallest:
            raise ValueError(
                f"staging_bytes={total} gives {depth} slots of {self.slot_bytes} bytes, and one row of every table takes "
                f"{smallest}; pass staging_bytes={smallest * depth} or more"
            )
        self._arenas = [device.empty((self.slot_bytes,), torch.uint8) for _ in range(depth)]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.slot_bytes * self.depth

    def needed(self, rows: Sequence[int]) -> int:
        """Bytes of a slot that holds ``rows`` distinct rows of each table."""
        return slot_bytes(self._source, rows, writable=self._writable)

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether one slot holds ``rows`` distinct rows of each table."""
        return self.needed(rows) <= self.slot_bytes

    def carve(self, number: int, rows: Sequence[int], dtypes: Sequence[Sequence[torch.dtype]]) -> list[Carved]:
        """The parts of window ``number``'s slot, one a table, uninitialised. Views, no copy.

        Args:
            rows: distinct rows of each table.
            dtypes: of each table's columns: the store's, or a narrower one that rows are cast to before they cross.
        """
        if self.lends:
            self._arenas[number % self.depth] = self._device.empty((self.slot_bytes,), torch.uint8)
        arena = self._arenas[number % self.depth]
        offset = 0
        parts = []
        for table, count, held in zip(self._source.tables, rows, dtypes, strict=True):
            columns, marks = [], []
            for column, dtype in zip(table.columns, held, strict=True):
                size = count * column.store.row_nbytes // column.store.dtype.itemsize * dtype.itemsize
                columns.append(arena[offset : offset + size].view(dtype).view(count, *column.store.row_shape))
                offset += _aligned(size)
            for _ in table.columns if self._writable else ():
                marks.append(arena[offset : offset + count])
                offset += _aligned(count)
            parts.append(Carved(tuple(columns), tuple(marks)))
        return parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@final
class PinnedPool:
    """Pinned host buffers that are lent, and come back when the work that uses them has passed.

    Sizes are rounded up to a power of two, so that buffers are found again; the pool comes to rest after the first
    windows. Any thread takes and gives: the producer takes, the consumer gives back what an item's copies used, and a thread
    that was abandoned may do either late.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: defaultdict[int, deque[Tensor]] = defaultdict(deque)  # by size
        self._busy: defaultdict[int, deque[tuple[Tensor, Event]]] = defaultdict(deque)  # ... until their events have passed
        self._all: list[Tensor] = []
        self._lock = threading.Lock()  # guards the three: a buffer is in one place, with one borrower
        self.nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least ``nbytes`` bytes (uint8, 1-d) that nobody uses any more."""
        exact = power_of_two(nbytes)
        with self._lock:
            for size in (exact, 2 * exact):
                busy, idle = self._busy[size], self._idle[size]
                while busy and busy[0][1].query():
                    idle.append(busy.popleft()[0])
                if idle:
                    return idle.popleft()
            buffer = self._device.pinned(exact)
            self.nbytes += exact
            self._all.append(buffer)
        return buffer

    def reclaim(self) -> None:
        """Every buffer is free again. Only when all work that used one has passed: an epoch ended in the middle."""
        with self._lock:
            self._busy.clear()
            self._idle.clear()
            for buffer in self._all:
                self._idle[buffer.numel()].append(buffer)

    def give(self, buffer: Tensor, event: Event | None) -> None:
        """``buffer`` may be lent again once ``event`` has passed."""
        with self._lock:
            if event is None:
                self._idle[buffer.numel()].append(buffer)
            else:
                self._busy[buffer.numel()].append((buffer, event))

    def upload(self, host: Tensor) -> tuple[Tensor, Tensor]:
        """``host`` copied into a pinned buffer: a view of ``host``'s shape and dtype, and the buffer to give back."""
        buffer = self.take(host.numel() * host.element_size())
        view = typed(buffer, host.dtype, host.shape)
        self._device.host_writes(view)
        view.copy_(host)
        return view, buffer


def typed(buffer: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The first bytes of ``buffer`` (uint8) as a tensor of ``dtype`` and ``shape``. A view."""
    count = 1
    for length in shape:
        count *= length
    return buffer[: count * dtype.itemsize].view(dtype).view(*shape)


def power_of_two(nbytes: int) -> int:
    """``nbytes`` rounded up, to 4096 at least: what buffers of changing size are taken as, so that they are found again."""
    return 1 << max(nbytes - 1, 4095).bit_length()
