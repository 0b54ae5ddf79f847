"""The smallest engine on rowferry's idea, for comparison: what it reaches without API, errors, writing or resuming.

A producer thread makes a window of a fixed number of batches: ids up, ``torch.unique`` on a plan stream (sorted distinct
rows, and where each id finds its own); then on a fetch stream a kernel of eight blocks reads those rows out of pinned
memory into one of three slots. The consumer serves a batch by ``index_select`` out of the slot. Without CUDA the same
program runs on the CPU, with ``index_select`` in the kernel's place: for its values, not for speed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from rowferry._bench.workloads import Ring
from rowferry.stores import PinnedStore
from rowferry.stores._devices import device_for

BLOCKS = 8  # of 512 threads
SLOTS = 3

_SOURCE = r"""
#define FLIGHT 4
extern "C" __global__ void fetch(const int4* __restrict__ table, int4* __restrict__ slot, const int* __restrict__ rows,
                                 const long long count, const long long vectors) {
    const unsigned width = (unsigned)vectors, all = (unsigned)(count * vectors);  // of a window: fewer than 2^31
    const unsigned step = gridDim.x * blockDim.x;
    for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < all; first += FLIGHT * step) {
        int4 held[FLIGHT];
        #pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {  // several reads of the bus are under way before the first is stored
            const unsigned at = first + i * step;
            if (at < all) held[i] = table[(long long)rows[at / width] * width + at % width];
        }
        #pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            const unsigned at = first + i * step;
            if (at < all) slot[at] = held[i];
        }
    }
}
"""

Fetch = Callable[[Tensor, Tensor], None]


@final
class BareEngine:
    """A ``Way``: batches of ``ring`` out of a pinned ``store`` of int32 rows of a multiple of 16 bytes.

    Args:
        window: batches that are fetched together. One epoch at a time.
    """

    def __init__(self, store: PinnedStore, ring: Ring, device: torch.device, window: int) -> None:
        self._table, self._ring, self._window = store.torch(), ring, window
        self._device = device_for(device)
        self._plan, self._fetching = self._device.stream("plan", high_priority=True), self._device.stream("fetch")
        ids = window * len(ring[0])
        self._slots = [self._device.empty((ids, self._table.shape[1]), self._table.dtype) for _ in range(SLOTS)]
        self._ids = [self._device.pinned(4 * ids).view(torch.int32) for _ in range(SLOTS)]
        self._fetch: Fetch = self._kernel() if self._device.is_cuda else self._select

    def epoch(self, count: int) -> Iterator[Tensor]:
        """``count`` batches; the producer thread ends with the iterator."""
        free: queue.Queue[Any] = queue.Queue()
        ready: queue.Queue[Any] = queue.Queue()
        for number in range(SLOTS):
            free.put((number, self._device.record(self._device.current())))
        producer = threading.Thread(target=self._produce, args=(count, free, ready), name="bare-producer", daemon=True)
        producer.start()
        try:
            yield from self._serve(count, free, ready)
        finally:
            free.put(None)
            producer.join()

    def close(self) -> None:
        """Give up the slots."""
        self._slots.clear()

    # ---- the producer's thread ----------------------------------------------------------------------------------------

    def _produce(self, count: int, free: queue.Queue[Any], ready: queue.Queue[Any]) -> None:
        try:
            self._device.enter_thread()
            planned = None
            for start in range(0, count, self._window):
                taken = free.get()
                if taken is None:
                    return
                number, vacated = taken
                vacated.synchronize()  # its ids have been read long ago, so the pinned buffer may be filled again
                planned = self._planned(number, range(start, min(start + self._window, count)))
                ready.put(self._fetched(number, *planned))
        except BaseException as error:
            ready.put(error)

    def _planned(self, number: int, batches: range) -> tuple[Tensor, Tensor, Any]:
        """Distinct rows in order, the place of each id among them, and the event after which they are there."""
        batch = len(self._ring[0])
        host = self._ids[number][: len(batches) * batch]
        np.concatenate([self._ring[each % len(self._ring)] for each in batches], out=host.numpy(), casting="same_kind")
        with self._device.use(self._plan):
            ids = self._device.empty(tuple(host.shape), host.dtype)
            self._device.copy(ids, host)
            rows, places = torch.unique(ids, sorted=True, return_inverse=True)
            return rows, places, self._device.record(self._plan)

    def _fetched(self, number: int, rows: Tensor, places: Tensor, planned: Any) -> tuple[int, Tensor, Any]:
        self._device.wait(self._fetching, planned)
        with self._device.use(self._fetching):
            self._fetch(self._slots[number][: len(rows)], rows)
            self._device.keep(rows, self._fetching)
            return number, places, self._device.record(self._fetching)

    # ---- the consumer's -----------------------------------------------------------------------------------------------

    def _serve(self, count: int, free: queue.Queue[Any], ready: queue.Queue[Any]) -> Iterator[Tensor]:
        batch = len(self._ring[0])
        served = 0
        while served < count:
            found = ready.get()
            if isinstance(found, BaseException):
                raise found
            number, places, filled = found
            stream = self._device.current()
            self._device.wait(stream, filled)
            self._device.keep(places, stream)
            for start in range(0, len(places), batch):
                yield self._slots[number].index_select(0, places[start : start + batch])
                served += 1
            free.put((number, self._device.record(stream)))

    # ---- the two ways to fetch ----------------------------------------------------------------------------------------

    def _select(self, out: Tensor, rows: Tensor) -> None:
        torch.index_select(self._table, 0, rows, out=out)

    def _kernel(self) -> Fetch:
        from rowferry.stores._kernels import kernels  # compiles and launches any source; needs CuPy

        width = self._table.shape[1] * self._table.itemsize // 16
        launch = kernels(self._device.torch, _SOURCE, {"fetch": (0, 0, 0, 0, 1)})["fetch"]

        def fetch(out: Tensor, rows: Tensor) -> None:
            launch(BLOCKS, self._table.data_ptr(), out.data_ptr(), rows.data_ptr(), len(rows), width)

        return fetch
