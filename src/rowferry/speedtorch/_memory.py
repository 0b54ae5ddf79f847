"""Page-locked memory as scripts asked for it. Nothing process-wide is changed by having it."""

from __future__ import annotations

from typing import Any, final

import torch

from rowferry.stores import PinnedStore
from rowferry.stores._devices import default_device
from rowferry.stores._kernels import available, pointer_to


@final
class PMemory:
    """``size`` bytes of zeroed memory: page-locked where there is CUDA, ordinary memory elsewhere. Given back with the object.

    Attributes:
        size: bytes. ptr: the address. device_id: the current CUDA device, -1 without one.
    """

    def __init__(self, size: int) -> None:
        self.memory = PinnedStore.zeros((size,), torch.uint8).torch()
        self.size, self.ptr = size, self.memory.data_ptr()
        device = default_device()
        self.device_id = -1 if device.index is None else device.index

    @property
    def mem(self) -> PMemory:
        """Itself, as a pointer to memory has it."""
        return self


def my_pinned_allocator(bsize: int) -> Any:
    """``bsize`` bytes of page-locked memory, as a CuPy allocator returns them: ``cupy.cuda.using_allocator`` takes this
    function. Without a GPU or CuPy the ``PMemory`` itself, which has a pointer's ``ptr`` and ``mem``."""
    memory = PMemory(bsize)
    return pointer_to(memory.memory) if bsize and available(default_device()) else memory
