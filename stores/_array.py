"""Rows of a NumPy array or CPU tensor, where they lie."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._contract import Store
from ._layout import check_layout, identity_of, layout_of
from ._views import HostRows


@final
class ArrayStore(Store):
    """Rows of a NumPy array or CPU tensor. It is used, not copied: writing to the store writes it, and the other way.

    ``memory`` is None for an array in other strides than C-contiguous, or in another byte order: its rows are copied
    one request at a time, and writes go to the array in its own layout.

    Args:
        array: ``(rows, *row_shape)``, of any numeric or bool dtype that torch has.
        writable: whether ``scatter`` is allowed. An array that NumPy calls read-only, and a tensor expanded over one
            memory, are read-only stores in any case; don't write to the ``memory`` of one either.
        name: what errors call the store.

    Raises:
        TypeError: not an array or tensor of the CPU, or a dtype that torch does not have. ValueError: no dimension.
    """

    def __init__(self, array: NDArray[Any] | torch.Tensor, *, writable: bool = True, name: str | None = None) -> None:
        if isinstance(array, torch.Tensor):
            source: NDArray[Any] | torch.Tensor = self._set_up_tensor(array)
        elif isinstance(array, np.ndarray):
            source = self._set_up_array(array)
        else:
            raise TypeError(
                f"ArrayStore takes a NumPy array or a CPU tensor, not a {type(array).__name__}; see rowferry.as_store"
            )
        self._rows: HostRows | None = HostRows(source)
        self.memory = self._rows.memory
        self.pinned = self.memory is not None and self.memory.nbytes > 0 and self.memory.is_pinned()
        self.writable = writable and self.writable
        self.name = name or "array in memory"

    def _set_up_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(
                f"ArrayStore takes an ordinary CPU tensor, not {tensor.layout} {tensor.dtype} on {tensor.device}; "
                f"DeviceStore holds tensors of a GPU"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise TypeError(
                "the tensor is a lazy conjugate or negative of other memory; pass tensor.resolve_conj().resolve_neg()"
            )
        tensor = tensor.detach()
        self.shape, self.dtype = check_layout(tensor.shape, tensor.dtype), tensor.dtype
        self.writable = not any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))
        self._identity = identity_of(tensor)
        return tensor

    def _set_up_array(self, array: NDArray[Any]) -> NDArray[Any]:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("a masked array would lose its mask; pass array.filled(value) or array.data")
        self.shape, self.dtype = layout_of(array)
        array = np.asarray(array)
        self.writable = bool(array.flags.writeable)
        self._identity = ("memory", "cpu", array.ctypes.data) if array.nbytes else ("memory", id(array))
        return array

    @property
    def identity(self) -> Hashable:
        return self._identity

    def any_order(self) -> bool:
        return True

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._held().gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._held().scatter(rows, values)

    def _flush(self, sync: bool) -> None:
        del sync  # memory: nothing is behind it

    def _close(self) -> None:
        self.memory, self._rows, self.pinned = None, None, False

    def _held(self) -> HostRows:
        rows = self._rows  # read once: another thread may close the store
        if rows is None:
            raise ValueError(f"{self.name} is closed; its memory was given back")
        return rows
