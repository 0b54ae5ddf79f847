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
from ._rows import check_index

# Indices that need not come to the host. A mask or uint64 (which int64 does not hold) is checked there.
_ON_DEVICE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)

SORT_FROM = 1 << 18  # rows; sorting pays when a kernel reads so many scattered rows that address translation limits it


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
    rows, shape = _rows(store, index, target)
    full = (*shape, *store.row_shape)
    with target.use(target.current()):
        found = _gather(store, rows, target) if rows.shape[0] else target.empty((0, *store.row_shape), store.dtype)
        found = found.view(full)
        return found if dtype is None else cast(found, dtype)


def _rows(store: Store, index: Any, target: Device) -> tuple[Tensor | NDArray[np.int64], tuple[int, ...]]:
    """Checked rows, 1-d: on the device where the index is a CUDA tensor of it, else on the host."""
    if not isinstance(index, Tensor) or index.device != target.torch or index.dtype not in _ON_DEVICE or not target.is_cuda:
        return check_index(index, len(store), store.name)
    rows = index.detach().reshape(-1).to(torch.int64)
    if rows.numel():
        bounds = torch.stack(torch.aminmax(rows)).cpu()
        check_index(bounds, len(store), store.name)
        if int(bounds[0]) < 0:
            rows = torch.where(rows < 0, rows + len(store), rows)
    return rows, tuple(index.shape)


def _gather(store: Store, rows: Tensor | NDArray[np.int64], target: Device) -> Tensor:
    if store.memory is not None and store.device == target.torch and target.is_cuda:
        chosen = rows if isinstance(rows, Tensor) else _upload(rows, target)
        return as_ints(store.memory).index_select(0, chosen).view(store.dtype)  # float8 has no index_select
    if target.is_cuda and store.pinned and store.memory is not None:
        from ._kernels import RowKernels, available

        if available(target.torch):
            return _over_the_bus(store.memory, rows, target, RowKernels(target.torch))
    host = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
    if not target.is_cuda or store.device.type != "cpu":  # to the CPU, or from another GPU
        out = torch.empty((len(host), *store.row_shape), dtype=store.dtype, device=store.device)
        store._gather(host, out)
        return out.to(target.torch)
    # torch's own pinned memory: its allocator keeps the block until the copy has passed.
    staged = torch.empty((len(host), *store.row_shape), dtype=store.dtype, pin_memory=True)
    store._gather(host, staged)
    return staged.to(target.torch, non_blocking=True)


def _over_the_bus(memory: Tensor, rows: Tensor | NDArray[np.int64], target: Device, kernels: Any) -> Tensor:
    """One kernel reads the pinned rows; many of them in sorted order, put back in place by the same kernel."""
    chosen = rows if isinstance(rows, Tensor) else _upload(rows, target)
    out = target.empty((chosen.numel(), *memory.shape[1:]), memory.dtype)
    if chosen.numel() < SORT_FROM:
        kernels.gather(out, memory, chosen)
    else:
        ascending, places = torch.sort(chosen)
        kernels.gather(out, memory, ascending, places=places)
    return out


def _upload(rows: NDArray[np.int64], target: Device) -> Tensor:
    """Row numbers on the device by a copy that does not block."""
    staged = torch.from_numpy(np.ascontiguousarray(rows)).pin_memory()
    return staged.to(target.torch, non_blocking=True)
