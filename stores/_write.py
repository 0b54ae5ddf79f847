"""``Store.scatter`` without the host: rows that are on a GPU, or go to one, are written on the caller's current stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._bytes import apart, as_ints
from ._casts import cast, castable
from ._contract import Store
from ._devices import device_for
from ._kernel_arguments import MOST_BLOCKS
from ._read import BLOCKS
from ._row_numbers import checked, on_device, planned


def write(store: Store, index: Any, values: Tensor) -> bool:
    """Write ``values`` into the rows of ``index`` on the current stream; False where that is the host's work.

    By a kernel, over the bus into the page-locked memory of a store that is reached through its own calls alone, or in the
    memory of a GPU; there by torch's operators where CuPy is missing. Of a row that occurs twice the last value stays: rows
    that go over the bus are sorted stably on the device, which a large table's address translation likes too. The host
    waits for nothing but the bounds of an index that is on the device. In a GPU's memory a call takes four bytes for each
    row of the table for a moment, where that is at most a KiB for each row written.

    Raises:
        IndexError, TypeError, ValueError: as ``Store.scatter``; nothing was launched.
    """
    memory = store.memory
    if memory is None or not (store.device.type == "cuda" or _over_the_bus(store, values)):
        return False
    target = device_for(store.device if store.device.type == "cuda" else values.device)
    rows, shape = checked(store, index, target)
    store._require_fit(values, shape)
    castable(values.dtype, store.dtype, store.name)
    if not rows.shape[0]:
        return True
    stream = target.current()
    with target.use(stream), torch.inference_mode(False):
        moved = cast(values.to(target.torch), store.dtype).reshape(rows.shape[0], *store.row_shape).contiguous()
        moved = apart(moved, memory)
        target.keep(moved, stream)
        if store.device.type == "cuda":
            _into_device_memory(memory, on_device(rows, store, target), moved)
            return True
        from ._kernels import RowKernels

        ascending, places, last = planned(rows, store, target, stream, sorted_rows)
        store.in_flight.before_write(target, stream)
        RowKernels(target.torch).scatter(memory, ascending, moved, places=places, marks=last, blocks=BLOCKS)
        store.in_flight.after_write(target, stream)
    return True


def _into_device_memory(memory: Tensor, rows: Tensor, values: Tensor) -> None:
    """The last value of each row, by one kernel where there are kernels. All on one stream: it is over too soon for two."""
    from ._kernels import RowKernels, available

    if not available(memory.device):
        ascending, places, last = sorted_rows(rows)
        chosen = as_ints(values).index_select(0, places_of_last(places, last))
        as_ints(memory).index_copy_(0, ascending.long(), chosen)  # equal values where a row occurs twice
        return
    from ._last_kernels import last_of_each_row, pays

    scatter = RowKernels(memory.device).scatter
    if pays(rows.shape[0], memory.shape[0]):
        scatter(memory, rows, values, marks=last_of_each_row(rows, memory.shape[0]), blocks=MOST_BLOCKS)
    else:
        ascending, places, last = sorted_rows(rows)
        scatter(memory, ascending, values, places=places, marks=last, blocks=MOST_BLOCKS)


def _over_the_bus(store: Store, values: Tensor) -> bool:
    """Whether a kernel may write the store's memory after the call has returned."""
    if not store.pinned or not store.owns_memory:
        return False
    from ._kernels import available

    return available(values.device)


def sorted_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rows`` ascending; where each stood, int64; and whether it is the last of its row in the order given. No sync."""
    ascending, places = torch.sort(rows, stable=True)
    last = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=last[:-1])
    return ascending, places, last


def places_of_last(places: Tensor, last: Tensor) -> Tensor:
    """For each of the sorted rows, where the last one of its row stood. No sync."""
    here = torch.arange(last.numel(), device=last.device)
    ends = torch.where(last, here, last.numel()).flip(0).cummin(0).values.flip(0)
    return places.index_select(0, ends)
