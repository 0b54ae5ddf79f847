"""Blocks of simulated memory: lent as tensors, told when the last reference died; which bytes of its block a tensor is."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._simulated_clocks import History
from ._simulated_queue import SimulatedStream

POISON = 0xA5
_GRAIN = 512  # bytes; what CUDA's allocator rounds to and aligns to


@final
class Block:
    """Bytes that are lent as one tensor at a time.

    Attributes:
        label: what errors call it.
        home: the stream whose pool it returns to (None: pinned, it returns to nobody).
        history: who used it.
        kept: the streams that ``Device.keep`` named since it was lent.
    """

    def __init__(self, label: str, home: SimulatedStream | None, nbytes: int) -> None:
        self.label = label
        self.home = home
        self.history = History()
        self.kept: list[SimulatedStream] = []
        self.capacity = -(-nbytes // _GRAIN) * _GRAIN
        room = np.empty(self.capacity + _GRAIN, np.uint8)
        self._raw: NDArray[np.uint8] = room[-room.ctypes.data % _GRAIN :][: self.capacity]
        self.fill()
        self._bytes = torch.from_numpy(self._raw)  # owns nothing that anyone waits for

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self._raw.ctypes.data)

    def fill(self) -> None:
        """Poison all bytes."""
        self._raw[:] = POISON

    def lend(self, shape: Sequence[int], dtype: torch.dtype, died: Callable[[Block], None]) -> torch.Tensor:
        """The block's first bytes as a contiguous tensor; ``died(self)`` is called when its storage dies.

        A storage dies with the last tensor that views it, whatever kind of view. ``died`` may run in any thread.
        """
        self.kept = []
        owner = self._raw.view(_Owner)  # torch holds this object exactly as long as the storage lives
        weakref.finalize(owner, died, self).atexit = False
        with torch.inference_mode(False):
            count = math.prod(shape)
            return torch.from_numpy(owner)[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements as ``tensor``, which is lent from here, without keeping it alive."""
        with torch.inference_mode(False):
            return torch.empty(0, dtype=tensor.dtype).set_(
                self._bytes.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )


class _Owner(np.ndarray[Any, Any]):
    """A view that can be watched for its death; plain arrays can too, but torch may look through them."""


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes ``[start, stop)`` of its storage from the first to the last element of ``tensor``, gaps included."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.itemsize


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Poison of ``tensor``'s shape and dtype, in memory of its own."""
    with torch.inference_mode(False):
        return torch.full((tensor.numel() * tensor.itemsize,), POISON, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
