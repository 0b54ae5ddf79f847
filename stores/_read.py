"""``Store.read``: rows on demand, ready on the caller's current stream. One plan and one gather, no thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._bytes import as_ints
from ._casts import cast, castable
from ._contract import Store
from ._device_contract import Device
from ._devices import device_for
from ._row_numbers import checked, on_device, planned

# A kernel that reads scattered rows of a large table is limited by address translation. Sorting them first, a tenth of a
# millisecond, pays from so many rows on, and only while rows are short: each of these is a factor of two or so.
SORT_FROM = 1 << 16  # rows
SMALL_TABLE = 1 << 30  # bytes; translations of this much are kept
LONG_ROW = 4096  # bytes
BLOCKS = 32  # a call on demand has its stream for itself; a pipeline's kernels, beside training, take fewer


def read(store: Store, index: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of ``store`` on ``device``: shape ``index.shape + row_shape``, always a fresh tensor.

    Ready on the stream that is current in the calling thread, ordered after what it has queued; the host does not
    wait for the copy. Pinned rows are read by a kernel over the bus; others are gathered by the host into pinned
    memory and copied.

    Args:
        index: as in ``Store.gather``; a CUDA tensor stays on the device (its bounds are read back, one wait).
        device: the current CUDA device if there is one, else the CPU; a DeviceStore's own device.
        dtype: what to cast to, rounded once; the store's own when None.

    Raises:
        IndexError, TypeError: a bad index or a cast that loses; nothing was read or launched.
        ValueError: no such device.
    """
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype {dtype!r} is not a torch dtype; pass torch.float32 or the like")
        castable(store.dtype, dtype)
    wanted = store.device if device is None and store.device.type == "cuda" else device
    target = device_for(wanted)
    rows, shape = checked(store, index, target)
    full = (*shape, *store.row_shape)
    with target.use(target.current()):
        found = _gather(store, rows, target) if rows.shape[0] else target.empty((0, *store.row_shape), store.dtype)
        found = found.view(full)
        return found if dtype is None else cast(found, dtype)


def _gather(store: Store, rows: Tensor | NDArray[np.int64], target: Device) -> Tensor:
    if store.memory is not None and store.device == target.torch and target.is_cuda:
        chosen = on_device(rows, store, target)
        return as_ints(store.memory).index_select(0, chosen).view(store.dtype)  # float8 has no index_select
    if target.is_cuda and store.pinned and store.memory is not None:
        from ._kernels import RowKernels, available

        if available(target.torch):
            return _over_the_bus(store, store.memory, rows, target, RowKernels(target.torch))
    store._settle(reading=True)
    host = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
    if not target.is_cuda or store.device.type != "cpu":  # to the CPU, or from another GPU
        out = torch.empty((len(host), *store.row_shape), dtype=store.dtype, device=store.device)
        store._gather(host, out)
        return out.to(target.torch)
    # torch's own pinned memory: its allocator keeps the block until the copy has passed.
    staged = torch.empty((len(host), *store.row_shape), dtype=store.dtype, pin_memory=True)
    store._gather(host, staged)
    return staged.to(target.torch, non_blocking=True)


def _over_the_bus(store: Store, memory: Tensor, rows: Tensor | NDArray[np.int64], target: Device, kernels: Any) -> Tensor:
    """One kernel reads the pinned rows; where it pays in sorted order, put back in place by the same kernel."""
    stream, count = target.current(), rows.shape[0]
    out = target.empty((count, *memory.shape[1:]), memory.dtype)
    places: Tensor | None = None
    if count >= SORT_FROM and memory.nbytes > SMALL_TABLE and store.row_nbytes < LONG_ROW:
        chosen, places = planned(rows, store, target, stream, lambda numbers: tuple(torch.sort(numbers)))
    else:
        chosen = on_device(rows, store, target)
    store.in_flight.before_read(target, stream)
    kernels.gather(out, memory, chosen, places=places, blocks=BLOCKS)
    store.in_flight.after_read(target, stream)
    return out
