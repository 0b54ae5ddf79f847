"""Large host tensors out of memory that earlier ones have left: what a system hands out anew costs a page fault for each
4 KiB, which for a batch of some MiB takes longer than to copy its rows.

Guarantees:
- A buffer is lent again only when the storage that it lay under has died: with its last tensor, NumPy view or capsule.
- At most ``MOST_KEPT`` bytes wait to be lent; what comes back beyond that is freed.

Any thread; a storage may die in any, at any moment.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 1 << 20  # bytes; smaller tensors are the allocator's business
MOST_KEPT = 256 << 20  # bytes


class _Lent(np.ndarray[Any, Any]):
    """A view of a buffer whose death can be watched."""


@final
class Recycler:
    """Lends buffers of sizes that are rounded up to an eighth of a power of two, so that they are found again."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._idle: dict[int, deque[NDArray[np.uint8]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be lent."""
        return sum(size * len(buffers) for size, buffers in list(self._idle.items()))

    def empty(self, nbytes: int) -> Tensor:
        """``nbytes`` uninitialised bytes, uint8, 1-d."""
        step = 1 << max(nbytes.bit_length() - 4, 0)
        size = -(-nbytes // step) * step
        idle = self._idle.setdefault(size, deque())
        try:
            buffer = idle.pop()  # the one that came back last is most likely in a cache
        except IndexError:
            buffer = np.empty(size, np.uint8)
        lent = buffer.view(_Lent)
        weakref.finalize(lent, self._back, buffer).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(lent)[:nbytes]

    def _back(self, buffer: NDArray[np.uint8]) -> None:
        if self.nbytes + buffer.nbytes <= self._most:
            self._idle[buffer.nbytes].append(buffer)
