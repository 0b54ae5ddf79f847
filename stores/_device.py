"""Rows in the memory of a device: a table that fits, so nothing has to be moved."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._bytes import as_ints
from ._contract import Store
from ._devices import resolve_device
from ._layout import check_layout, fill, identity_of, layout_of


@final
class DeviceStore(Store):
    """The rows of a torch tensor on a GPU (or on the CPU), used where they lie.

    Work runs on the current stream of the calling thread: what ``gather`` returns is ready on that stream, and
    ``scatter`` returns before a GPU has written. Order other streams by events of your own.

    Args:
        tensor: ``(rows, *row_shape)``, C-contiguous. It is used, not copied: writing to the store writes it.
        name: what errors call the store.

    Raises:
        TypeError: not a tensor. ValueError: no dimension, or not contiguous.
    """

    writable = True

    def __init__(self, tensor: torch.Tensor, *, name: str | None = None) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"DeviceStore takes a torch tensor, not a {type(tensor).__name__}; DeviceStore.from_array copies one"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor has strides {tensor.stride()}; rows must be contiguous: pass tensor.contiguous()")
        self.shape = check_layout(tensor.shape, tensor.dtype)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.memory = tensor.detach()
        self.name = name or f"memory of {tensor.device}"

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype, *, device: torch.device | str | None = None, name: str | None = None
    ) -> Self:
        """A store whose rows nobody has set, on ``device`` (the current CUDA device if there is one, else the CPU)."""
        with torch.inference_mode(False):
            return cls(torch.empty(check_layout(shape, dtype), dtype=dtype, device=resolve_device(device)), name=name)

    @classmethod
    def zeros(
        cls, shape: Sequence[int], dtype: torch.dtype, *, device: torch.device | str | None = None, name: str | None = None
    ) -> Self:
        """A store of zeros, on ``device`` as for ``empty``."""
        with torch.inference_mode(False):
            return cls(torch.zeros(check_layout(shape, dtype), dtype=dtype, device=resolve_device(device)), name=name)

    @classmethod
    def from_array(cls, array: Any, *, device: torch.device | str | None = None, name: str | None = None) -> Self:
        """A store with a copy of a NumPy, torch (any device) or CuPy array, of its dtype, copied in pieces of 64 MiB.

        Raises:
            TypeError: another kind of object, or a dtype that torch does not have.
        """
        shape, dtype = layout_of(array)
        store = cls.empty(shape, dtype, device=device, name=name)
        fill(store, array)
        return store

    @property
    def identity(self) -> Hashable:
        return identity_of(self._held())

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        # By bits: not every dtype has an index_select on every device (float8 has none).
        torch.index_select(as_ints(self._held()), 0, self._places(rows), out=as_ints(out))

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        as_ints(self._held()).index_copy_(0, self._places(rows), as_ints(values))

    def _flush(self, sync: bool) -> None:
        del sync  # memory: nothing is behind it

    def _close(self) -> None:
        self.memory = None

    def _places(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Host row numbers on the device. ``rows`` may be the caller's array, so the copy has landed on return."""
        if not rows.flags.writeable:
            rows = rows.copy()  # torch warns of read-only arrays
        return torch.from_numpy(rows).to(self.device)

    def _held(self) -> torch.Tensor:
        if self.memory is None:
            raise ValueError(f"{self.name} is closed; its memory was given back")
        return self.memory
