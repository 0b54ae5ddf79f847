"""The mover ``copy``: host threads gather into small pinned pieces, the copy engine carries them; and the same way back."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Generator, Iterator
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._casts_on_host import cast_on_host
from rowferry.stores._device_contract import Device, Event
from rowferry.stores._rows import split_sorted

from ._engine import Host, Task, pause
from ._mixing import Mixing
from ._movers import DrainList, FetchList, pick_rows
from ._runs import are_few, copy_in, copy_out
from ._staging import power_of_two, typed

PIECE_BYTES = 16 << 20  # a thread's call: measured on 16 cores, pieces of 1 / 4 / 16 MiB gather 5 / 17 / 30 GB/s
CHUNKED_PIECE_BYTES = 64 << 20  # chunks are decoded once a call, so calls are long

FEW_THREADS = 4  # read a disk as fast as sixteen do, and slow a training loop less
AHEAD_BYTES = 64 << 20  # of the next window's rows, that a store is told of while this one's are copied


@final
class Copy:
    """Host threads gather into small pinned pieces, the copy engine carries them; and the same way back.

    Rows of pinned memory that are few long runs go by the copy engine alone.

    Args:
        threads: most host threads.
        bus: the store's memory, where the copy engine reads and writes it at full speed; else None.
        cast: what host threads cast rows to before they cross; None to cross as they are. Only for reading.
        why: in words, why rows cross this way.
    """

    wants_host_rows = True
    trying = False

    def __init__(
        self,
        device: Device,
        store: Store,
        threads: int,
        *,
        bus: Tensor | None = None,
        cast: torch.dtype | None = None,
        why: str = "host threads gather rows ahead of use, the copy engine carries them",
    ) -> None:
        self.name = "copy" if cast is None else "copy, cast on the host"
        self.why = why
        self._device = device
        self._store = store
        self._bus = bus if cast is None else None
        self._cast = cast
        self._host: Host | None = None
        self._threads = threads
        chunked = store.chunk_rows > 1
        self._piece_rows = max((CHUNKED_PIECE_BYTES if chunked else PIECE_BYTES) // max(store.row_nbytes, 1), 1)
        size = 2 if chunked else threads + 2  # pieces of chunks are gathered one after the other
        self._rings = {"fetch": _Ring(device, size), "drain": _Ring(device, size)}
        self._mixing = Mixing(device, store, threads)
        self._reached = 0  # the row after the last window that was a run

    def holds(self, *, host_rows: bool) -> torch.dtype:
        del host_rows
        return self._cast or self._store.dtype

    def fetch(self, stream: Any, out: Tensor, wanted: FetchList) -> Task:
        device, store, ring, rows = self._device, self._store, self._rings["fetch"], wanted.host
        if self._bus is not None and wanted.runs is not None and are_few(wanted.runs, out):
            with device.use(stream):
                copy_in(device, self._bus, wanted.runs, out)
            return
        assert rows is not None
        if wanted.mixed is not None and not store.any_order():
            assert self._host is not None
            yield from self._mixing.fetch(self._host, wanted.mixed, out)
            return

        def bring(span: tuple[int, int]) -> None:
            start, stop = span
            if not device.asynchronous:
                store._gather(rows[start:stop], out[start:stop])
                return
            with ring.lent() as slot:
                piece = slot.piece(out[start:stop])
                device.host_writes(piece)
                if self._cast is None:
                    store._gather(rows[start:stop], piece)
                else:
                    uncast = slot.uncast(piece, store.dtype)
                    store._gather(rows[start:stop], uncast)
                    cast_on_host(uncast, piece)
                with device.use(stream):
                    device.copy(out[start:stop], piece)
                    slot.event = device.record(stream)

        self._tell_ahead(wanted)
        yield from self._spread(bring, rows)

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        device, store, ring = self._device, self._store, self._rings["drain"]
        if self._bus is not None and listed.runs is not None and are_few(listed.runs, listed.column):
            with device.use(stream):
                copy_out(device, listed.column, listed.runs, self._bus)
                return len(listed.column), device.record(stream)
        places, rows, total = yield from self._compact(stream, listed)  # after which all drains before have landed

        def send(span: tuple[int, int]) -> None:
            start, stop = span
            with ring.lent() as slot:
                with device.use(stream):
                    chosen = device.empty((stop - start, *listed.column.shape[1:]), listed.column.dtype)
                    pick_rows(device, "pick", listed.column, places[start:stop], out=chosen)
                    piece = slot.piece(chosen)
                    device.copy(piece, chosen)
                    event = device.record(stream)
                event.synchronize()
                device.host_reads(piece)
                store._scatter(rows[start:stop], piece)

        yield from self._spread(send, rows)
        return total, None

    def _tell_ahead(self, wanted: FetchList) -> None:
        """Tell the store which rows come next, where windows follow each other in an order that is known."""
        store, most = self._store, max(AHEAD_BYTES // max(self._store.row_nbytes, 1), 1)
        if wanted.mixed is not None:
            after = wanted.mixed.after(most)
            if len(after):
                store.expect(after.rows())
        elif wanted.runs is not None and len(wanted.runs) == 1:
            [(start, stop)] = wanted.runs
            follows, self._reached = start == self._reached, stop
            last = min(stop + min(stop - start, most), len(store))
            if follows and stop < last:
                store.expect(np.arange(stop, last))

    def _spread(self, move: Callable[[tuple[int, int]], None], rows: NDArray[np.int64]) -> Task:
        """``move`` every piece of ``rows``, side by side where a piece is no chunk's business but its own; else they ascend.

        A thread takes a whole piece, because that is one long call; several threads on a piece would spend their time
        handing the GIL around.
        """
        assert self._host is not None
        together = min(self._threads, FEW_THREADS) if self._store.from_disk() else self._threads
        together = together if self._store.chunk_rows == 1 else 1
        pieces = split_sorted(rows, self._piece_rows, self._store.chunk_rows)
        while some := list(itertools.islice(pieces, 4 * together if together > 1 else 1)):
            self._host.spread(move, some, most=together)
            yield pause

    def bind(self, host: Host) -> None:
        self._host = host

    def rest(self) -> None:
        for ring in self._rings.values():
            ring.release()
        self._mixing.release()

    def held(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values()) + self._mixing.nbytes

    def _compact(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[Tensor, NDArray[np.int64], int]]:
        """Places and rows of the marked rows, rows ascending; the rows on the host."""
        device = self._device
        size = listed.marks.numel()
        numbers = self._rings["drain"].numbers.memory(8 * (size + 1))
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


def _compact(listed: DrainList, number: Tensor, total: int, places: Tensor, rows: Tensor) -> None:
    at = torch.where(listed.marks[listed.places] > 0, number - 1, total)  # unmarked rows go to the spare last place
    places.scatter_(0, at, listed.places)
    rows.scatter_(0, at, listed.ascending.to(torch.int64))


@final
class _RingSlot:
    """One pinned piece. ``event``: the copy out of it has passed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._uncast: Tensor | None = None
        self.event: Event | None = None

    @property
    def nbytes(self) -> int:
        return self._memory.numel() if self._memory is not None else 0

    def memory(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` pinned bytes. Only after ``event`` has passed on the host."""
        if self.nbytes < nbytes:
            self._memory = self._device.pinned(power_of_two(nbytes))
        assert self._memory is not None
        return self._memory

    def piece(self, like: Tensor) -> Tensor:
        """Pinned memory of the shape and dtype of ``like``."""
        return typed(self.memory(like.numel() * like.element_size()), like.dtype, tuple(like.shape))

    def uncast(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """Ordinary memory for the rows of ``piece`` before their cast."""
        nbytes = piece.numel() * dtype.itemsize
        if self._uncast is None or self._uncast.numel() < nbytes:
            self._uncast = torch.empty(power_of_two(nbytes), dtype=torch.uint8, device="cpu")
        return typed(self._uncast, dtype, tuple(piece.shape))

    def release(self) -> None:
        """Give the memory up. Only after ``event`` has passed on the host."""
        self._memory = self._uncast = None


@final
class _Ring:
    """A few pinned pieces, lent to the threads that gather, oldest first. Any thread."""

    def __init__(self, device: Device, size: int) -> None:
        self._slots = [_RingSlot(device) for _ in range(size)]
        self._idle: queue.SimpleQueue[_RingSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._idle.put(slot)
        self.numbers = _RingSlot(device)

    @contextlib.contextmanager
    def lent(self) -> Iterator[_RingSlot]:
        """A piece that nothing uses any more; blocks until there is one."""
        slot = self._idle.get()
        try:
            if slot.event is not None:
                slot.event.synchronize()
                slot.event = None
            yield slot
        finally:
            self._idle.put(slot)

    def release(self) -> None:
        """Give up the memory of pieces that nobody has; a thread that is stuck inside a store keeps its own."""
        for _ in range(self._idle.qsize()):
            with self.lent() as slot:
                slot.release()
        self.numbers.release()

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + sum(slot.nbytes for slot in self._slots)
