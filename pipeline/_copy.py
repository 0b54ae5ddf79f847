"""The mover ``copy``: host threads gather into small pinned pieces, the copy engine carries them; and the same way back."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._device_contract import Device, Event
from rowferry.stores._rows import split_sorted

from ._engine import Host, Task
from ._movers import DrainList, as_ints
from ._staging import typed

PIECE_BYTES = 8 << 20  # pinned pieces this small stay in the cache between the host's gather and the copy engine
CHUNKED_PIECE_BYTES = 64 << 20  # chunks are decoded once a call, so calls are long
RING = 4


@final
class Copy:
    """Host threads gather into small pinned pieces, the copy engine carries them; and the same way back."""

    name = "copy"
    wants_host_rows = True
    lands_on_host = True

    def __init__(self, device: Device, store: Store, threads: int) -> None:
        self._device = device
        self._store = store
        self._host: Host | None = None
        self._threads = threads
        chunked = store.chunk_rows > 1
        self._piece_rows = max((CHUNKED_PIECE_BYTES if chunked else PIECE_BYTES) // max(store.row_nbytes, 1), 1)
        self._rings = {"fetch": _Ring(device), "drain": _Ring(device)}

    def fetch(self, stream: Any, out: Tensor, rows: Tensor, host_rows: NDArray[np.int64] | None) -> Task:
        del rows
        assert host_rows is not None
        if not self._device.asynchronous:
            for start, stop in self._pieces(host_rows):
                self._gather(host_rows[start:stop], out[start:stop])
                yield _at_once
            return
        ring = self._rings["fetch"]
        for start, stop in self._pieces(host_rows):
            slot = ring.next()
            if slot.event is not None:
                yield slot.event
            piece = typed(slot.memory((stop - start) * self._store.row_nbytes), out.dtype, (stop - start, *out.shape[1:]))
            self._device.host_writes(piece)
            self._gather(host_rows[start:stop], piece)
            with self._device.use(stream):
                self._device.copy(out[start:stop], piece)
                slot.event = self._device.record(stream)
            yield _at_once

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        device, ring = self._device, self._rings["drain"]
        places, rows, total = yield from self._compact(stream, listed)
        if not total:
            return 0, None
        for start, stop in self._pieces(rows):
            slot = ring.next()
            count = stop - start
            piece = typed(slot.memory(count * self._store.row_nbytes), listed.column.dtype, (count, *listed.column.shape[1:]))
            with device.use(stream):
                chosen = device.empty(piece.shape, piece.dtype)
                at = places[start:stop]
                device.launch(
                    "pick",
                    lambda at=at, chosen=chosen: torch.index_select(as_ints(listed.column), 0, at, out=as_ints(chosen)),
                    reads=[listed.column, at],
                    writes=[chosen],
                )
                device.copy(piece, chosen)
                event = device.record(stream)
            yield event
            device.host_reads(piece)
            self._store._scatter(rows[start:stop], piece)
            yield _at_once
        return total, None

    def bind(self, host: Host) -> None:
        self._host = host

    def held(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    def _compact(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[Tensor, NDArray[np.int64], int]]:
        """Places and rows of the marked rows, rows ascending; the rows on the host."""
        device = self._device
        size = listed.marks.numel()
        numbers = self._rings["drain"].small(8 * (size + 1))
        total_host = typed(numbers, torch.int64, (1,))
        with device.use(stream):
            number = device.empty((size,), torch.int64)
            device.launch(
                "number",
                lambda: torch.cumsum(listed.marks[listed.places], 0, out=number),
                reads=[listed.marks, listed.places],
                writes=[number],
            )
            device.copy(total_host, number[-1:])
            event = device.record(stream)
        yield event
        device.host_reads(total_host)
        total = int(total_host.item())
        if not total:
            return number, np.empty(0, np.int64), 0
        rows_host = typed(numbers[8:], torch.int64, (total,))
        with device.use(stream):
            places, rows = device.empty((total + 1,), torch.int64), device.empty((total + 1,), torch.int64)
            device.launch(
                "compact",
                lambda: _compact(listed, number, total, places, rows),
                reads=[listed.marks, listed.places, listed.ascending, number],
                writes=[places, rows],
            )
            device.copy(rows_host, rows[:total])
            event = device.record(stream)
        yield event
        device.host_reads(rows_host)
        return places[:total], rows_host.numpy().copy(), total

    def _pieces(self, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        return list(split_sorted(rows, self._piece_rows, self._store.chunk_rows))

    def _gather(self, rows: NDArray[np.int64], out: Tensor) -> None:
        """One piece, by several threads where its rows are independent."""
        parts = self._threads if self._store.chunk_rows == 1 and len(rows) >= 64 * self._threads else 1
        edges = np.linspace(0, len(rows), parts + 1).astype(int).tolist()
        assert self._host is not None
        self._host.spread(
            lambda span: self._store._gather(rows[span[0] : span[1]], out[span[0] : span[1]]),
            zip(edges, edges[1:], strict=False),
        )


def _compact(listed: DrainList, number: Tensor, total: int, places: Tensor, rows: Tensor) -> None:
    at = torch.where(listed.marks[listed.places] > 0, number - 1, total)  # unmarked rows go to the spare last place
    places.scatter_(0, at, listed.places)
    rows.scatter_(0, at, listed.ascending.to(torch.int64))


def _at_once() -> bool:
    """A yield that waits for nothing: lets shutdown in, and a simulated scheduler."""
    return True


@final
class _RingSlot:
    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self._memory: Tensor | None = None
        self.event: Event | None = None

    def memory(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` pinned bytes. After the slot's event has passed on the host."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = self._ring.allocate(1 << max(nbytes - 1, 4095).bit_length())
        return self._memory


@final
class _Ring:
    """A few pinned pieces, used one after the other by one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots = [_RingSlot(self) for _ in range(RING)]
        self._numbers = _RingSlot(self)
        self._at = 0
        self.nbytes = 0

    def next(self) -> _RingSlot:
        self._at = (self._at + 1) % RING
        return self._slots[self._at]

    def small(self, nbytes: int) -> Tensor:
        return self._numbers.memory(nbytes)

    def allocate(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return self._device.pinned(nbytes)
