"""Reading: a way to get batches onto the device, checked, then timed. rowferry is one way, peers are others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self, final

import torch
from torch import Tensor

from rowferry.pipeline import Pipeline, Stats
from rowferry.stores import PinnedStore, Store
from rowferry.stores._bytes import as_ints
from rowferry.stores._device_contract import Device
from rowferry.stores._devices import device_for

from .clock import Timing, clock, idle
from .workloads import Batches, Index, Ring

CHECKED_BATCHES = 4
Oracle = Callable[[Index], Tensor]


class Way(Protocol):
    """A way for rows to reach a device. Batches are tensors on it, or have them as ``data``."""

    def epoch(self, count: int) -> Iterator[Any]:
        """Begin ``count`` batches of the way's ring."""

    def close(self) -> None:
        """Give up what it holds."""


@final
class Ferried:
    """rowferry's way: a pipeline over ``source`` whose batches are those of ``ring``. ``settings`` are the pipeline's."""

    def __init__(self, source: Any, ring: Ring, device: torch.device, **settings: Any) -> None:
        self._items = Batches(ring, 1)
        self.pipe = Pipeline(source, batch_sampler=self._items, device=device, **settings)

    def epoch(self, count: int) -> Iterator[Any]:
        self._items.count = count
        return iter(self.pipe)

    def stats(self) -> Stats:
        """The pipeline's counters."""
        return self.pipe.stats()

    def close(self) -> None:
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def stamped(rows: int, row_bytes: int) -> PinnedStore:
    """A pinned table whose rows begin and end with their own number: int32, or uint8 where 4 does not divide the row."""
    if row_bytes % 4:
        store = PinnedStore.zeros((rows, row_bytes), torch.uint8)
        numbers = torch.arange(rows).remainder_(256).to(torch.uint8)
    else:
        store = PinnedStore.zeros((rows, row_bytes // 4), torch.int32)
        numbers = torch.arange(rows, dtype=torch.int32)
    table = store.torch()
    table[:, 0] = numbers
    table[:, -1] = numbers
    return store


def rows_of(store: Store) -> Oracle:
    """What a batch must hold, read on the host and in the simplest way there is."""
    memory = store.memory
    if memory is None:
        return store.gather
    return lambda index: memory[torch.from_numpy(index)]


def check(way: Way, ring: Ring, oracle: Oracle, name: str, count: int = CHECKED_BATCHES) -> None:
    """Compare the first batches, bit for bit. Also warms up what is made at the first batch.

    Raises:
        AssertionError: a batch holds other rows than were asked for, or some are missing.
    """
    batches = 0
    for number, batch in enumerate(way.epoch(count)):
        found, expected = batch.data, oracle(ring[number % len(ring)])
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise AssertionError(f"{name}: batch {number} is {_layout(found)}, not {_layout(expected)}")
        if not torch.equal(as_ints(found.cpu().contiguous()), as_ints(expected)):
            raise AssertionError(f"{name}: batch {number} holds rows that were not asked for")
        batches += 1
    if batches != count:
        raise AssertionError(f"{name}: {batches} batches came, and {count} were asked for")


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def read_run(way: Way, device: Device, count: int, stop: float) -> Timing:
    """An epoch, timed from its beginning, when nothing is fetched, to its last batch on the device."""
    idle(device)
    taken, start = 0, clock()
    epoch = way.epoch(count)
    for _batch in epoch:
        taken += 1
        if clock() >= stop:
            break
    idle(device)
    return Timing(taken, clock() - start)


def reader(way: Way, device: torch.device) -> Callable[[int, float], Timing]:
    """``read_run`` of one way, as a ``Run``."""
    target = device_for(device)
    return lambda count, stop: read_run(way, target, count, stop)
