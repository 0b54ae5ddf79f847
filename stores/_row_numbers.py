"""Row numbers on their way to a device: checked, then there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._contract import Store
from ._device_contract import Device
from ._devices import device_for
from ._rows import check_index

# Indices that need not come to the host. A mask or uint64 (which int64 does not hold) is checked there.
_ON_DEVICE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)


def checked(store: Store, index: Any, target: Device) -> tuple[Tensor | NDArray[np.int64], tuple[int, ...]]:
    """The rows that ``index`` names, 1-d, and its shape: on the device where it is a CUDA tensor of it, else on the host.

    The bounds of a CUDA tensor are read back, for which the host waits once.

    Raises:
        IndexError, TypeError: as ``check_index``.
    """
    if not isinstance(index, Tensor) or index.device != target.torch or index.dtype not in _ON_DEVICE or not target.is_cuda:
        return check_index(index, len(store), store.name)
    rows = index.detach().reshape(-1).to(torch.int64)
    if rows.numel():
        bounds = torch.stack(torch.aminmax(rows)).cpu()
        check_index(bounds, len(store), store.name)
        if int(bounds[0]) < 0:
            rows = torch.where(rows < 0, rows + len(store), rows)
    return rows, tuple(index.shape)


def on_device(rows: Tensor | NDArray[np.int64], store: Store, target: Device) -> Tensor:
    """Checked rows on the device, contiguous, int32 where that holds every row of the store, by a copy that does not block."""
    dtype = torch.int32 if len(store) < 1 << 31 else torch.int64
    if isinstance(rows, Tensor):
        return rows.to(dtype).contiguous()  # every other number of a tensor is a view, and kernels go by its pointer
    staged = torch.empty(rows.size, dtype=dtype, pin_memory=True)  # its allocator keeps the block until the copy has passed
    np.copyto(staged.numpy(), rows, casting="same_kind")
    return staged.to(target.torch, non_blocking=True)


def planned(
    rows: Tensor | NDArray[np.int64], store: Store, target: Device, stream: Any, plan: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """``plan(rows)`` on the device, for kernels on ``stream``, which is current.

    Rows that come from the host are planned on a stream of their own: beside what ``stream`` still has to do, as when the
    rows of one call cross while the host is at the next.
    """
    if isinstance(rows, Tensor):
        return plan(on_device(rows, store, target))
    beside = _beside(target.torch)
    with target.use(beside):
        made = plan(on_device(rows, store, target))
    target.wait(stream, target.record(beside))
    for tensor in made:
        target.keep(tensor, stream)
    return made


@functools.cache
def _beside(device: torch.device) -> Any:
    return device_for(device).stream("row numbers")
