"""Other ways to get the same batches onto the device, written as their users would write them.

A peer is asked first whether it can read a table here; one that can't says why, and that is reported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.dlpack import from_dlpack

from rowferry.stores import MemmapStore, PinnedStore, Store
from rowferry.stores._device_contract import Device

from .reading import Oracle, rows_of
from .workloads import Batches, Index, Ring

_BUFFERS = 2

Batched = Callable[[Iterable[Index]], Iterator[Tensor]]
"""From index batches to batches on the device."""


class Table(NamedTuple):
    """What peers read: a store, where batches go, and how rows are indexed on the host without rowferry."""

    store: Store
    device: Device
    host: Oracle

    @property
    def on_gpu(self) -> bool:
        return self.device.is_cuda


class Peer(NamedTuple):
    """A way of others. ``problem``: why it can't read a table here, empty when it can. ``open``: made ready, untimed."""

    name: str
    problem: Callable[[Table], str]
    open: Callable[[Table, int], Batched]


@final
class Peered:
    """A peer as a ``Way``: ``batch`` rows a batch, those of ``ring``."""

    def __init__(self, peer: Peer, table: Table, ring: Ring) -> None:
        self._items = Batches(ring, 1)
        self._batches = peer.open(table, len(ring[0]))

    def epoch(self, count: int) -> Iterator[Any]:
        self._items.count = count
        return self._batches(self._items)

    def close(self) -> None:
        del self._batches


def table_of(store: Store, device: Device, host: Oracle | None = None) -> Table:
    """A table for peers; ``host`` indexes rows that lie in no memory, as ``zarr``'s own indexing does."""
    return Table(store, device, host or rows_of(store))


def installed(package: str) -> str:
    """Empty where ``package`` can be imported, else that it can't."""
    return "" if importlib.util.find_spec(package) is not None else f"{package} is not installed"


def anywhere(table: Table) -> str:
    """Of a peer that reads any table."""
    del table
    return ""


# ---- index on the host, then .to() ------------------------------------------------------------------------------------


def _open_indexing(table: Table, batch: int) -> Batched:
    del batch

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        for index in items:
            yield table.host(index).to(table.device.torch)

    return batches


# ---- index_select into pinned memory, then an asynchronous copy ------------------------------------------------------


def _in_memory(table: Table) -> str:
    return "" if table.store.memory is not None else f"index_select needs rows in memory as they are; {_what(table)} has none"


def _open_pinned_select(table: Table, batch: int) -> Batched:
    memory, device = table.store.memory, table.device
    assert memory is not None
    nbytes = batch * table.store.row_nbytes
    shape = (batch, *table.store.row_shape)
    buffers = [device.pinned(nbytes).view(memory.dtype).view(shape) for _ in range(_BUFFERS)]

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        copied: list[Any] = [None] * _BUFFERS
        for number, index in enumerate(items):
            place = number % _BUFFERS
            if copied[place] is not None:
                copied[place].synchronize()  # the copy out of this buffer has passed
            torch.index_select(memory, 0, torch.from_numpy(index), out=buffers[place])
            rows = device.empty(shape, memory.dtype)
            device.copy(rows, buffers[place])
            copied[place] = device.record(device.current())
            yield rows

    return batches


# ---- DataLoader with pin_memory ---------------------------------------------------------------------------------------


class Rows(Dataset[Tensor]):
    """A map-style dataset that gives the rows of a whole index batch in one call."""

    def __init__(self, host: Oracle) -> None:
        self._host = host

    def __getitem__(self, index: Index) -> Tensor:
        return self._host(index)


def loader_over(host: Oracle, items: Any, *, pin: bool, workers: int = 0) -> DataLoader[Tensor]:
    """A DataLoader whose batches are those of ``items``, index arrays: a sampler of batches, no collation."""
    return DataLoader(Rows(host), sampler=items, batch_size=None, pin_memory=pin, num_workers=workers)


def _open_loader(table: Table, batch: int) -> Batched:
    del batch

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        for rows in loader_over(table.host, items, pin=table.on_gpu):
            yield rows.to(table.device.torch, non_blocking=True)

    return batches


# ---- CuPy fancy indexing over pinned memory, which is SpeedTorch's way -----------------------------------------------


def _cupy_problem(table: Table) -> str:
    if not table.on_gpu:
        return "CuPy needs a GPU"
    if not isinstance(table.store, PinnedStore):
        return f"needs pinned memory; {_what(table)} is not"
    return installed("cupy")


def _open_cupy(table: Table, batch: int) -> Batched:
    del batch
    import cupy

    assert isinstance(table.store, PinnedStore)
    with cupy.cuda.Device(table.device.torch.index):
        rows = table.store.cupy()

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        for index in items:
            with cupy.cuda.Device(table.device.torch.index):
                found = rows[cupy.asarray(index)]
            yield from_dlpack(found)

    return batches


def _what(table: Table) -> str:
    return f"a {type(table.store).__name__}" + (" as it is" if isinstance(table.store, MemmapStore) else "")


PEERS = (
    Peer("index on the host, then .to()", anywhere, _open_indexing),
    Peer("index_select into pinned memory, then copy", _in_memory, _open_pinned_select),
    Peer("DataLoader, pin_memory", anywhere, _open_loader),
    Peer("CuPy fancy indexing over pinned memory", _cupy_problem, _open_cupy),
)
