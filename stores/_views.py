"""One memory seen by NumPy and by torch, and rows of NumPy arrays that torch can't see (other strides or byte order).

Guarantees:
- Each function is a fixed number of NumPy calls that release the GIL, whatever the number of rows; none starts threads.
- Bits stay as they are; byte order is the only thing that changes.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._bytes import gather_rows, scatter_rows
from ._rows import as_slice

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What NumPy has no type for; files and arrays hold them as integers or raw bytes of the same size.
BY_BITS = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


@final
class HostRows:
    """Rows of host memory in any layout, gathered and scattered where they lie.

    Args:
        source: ``(rows, *row_shape)``: a CPU tensor, or an array of any strides, byte order and alignment.
        dtype: torch dtype of the elements where ``source`` holds them as integers of their size (bfloat16, float8).

    Attributes:
        memory: all rows as a tensor, without a copy; None for strides or a byte order that torch does not have.
    """

    def __init__(self, source: NDArray[Any] | torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.memory: torch.Tensor | None = None
        if isinstance(source, np.ndarray):
            self._array = source
            if source.flags.c_contiguous and source.dtype.isnative:
                self.memory = tensor_over(source) if dtype is None else tensor_over(source).view(dtype)
        elif source.is_contiguous():
            self.memory = source
        else:
            self._array = (source if source.dtype.is_complex else source.view(_BITS[source.dtype.itemsize])).numpy()

    def gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        """As ``Store._gather``."""
        if self.memory is None:
            gather_array(self._array, rows, out)
        else:
            gather_rows(self.memory, rows, out)

    def scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        """As ``Store._scatter``."""
        if self.memory is None:
            scatter_array(self._array, rows, values)
        else:
            scatter_rows(self.memory, rows, values)


class _Plain:
    """A C-contiguous array's memory as torch takes it, writable and with strides that say so; keeps the array alive.

    Else torch would warn of a read-only array, and refuse the odd strides that NumPy leaves to dimensions of length 1.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False), "strides": None}


def tensor_over(array: NDArray[Any]) -> torch.Tensor:
    """``array``, C-contiguous, native and of a dtype that torch has, as a tensor over the same memory. Never copies.

    torch has no read-only tensors: whoever gets one over a read-only array must not write to it.
    """
    if not array.size:
        return torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
    return torch.from_numpy(np.asarray(_Plain(array)))


def to_tensor(values: Any) -> torch.Tensor:
    """``values`` (torch, NumPy of any layout, or what torch makes a tensor of) as a tensor to read from; copies if it must.

    Raises:
        TypeError: elements that torch has no dtype for.
    """
    if isinstance(values, torch.Tensor):
        return values.detach().resolve_conj().resolve_neg()
    if isinstance(values, np.ndarray):
        return tensor_over(np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(values.shape))
    return torch.as_tensor(values)


def gather_array(array: NDArray[Any], rows: NDArray[np.int64], out: torch.Tensor) -> None:
    """``out[i] = array[rows[i]]``, into native byte order. Holds one more copy of the rows meanwhile.

    Args:
        array: ``(n, *row_shape)``, any strides, byte order and alignment.
        rows: 1-d, in ``[0, n)``, any order, repeats allowed.
        out: ``(len(rows), *row_shape)``, C-contiguous, on the CPU, of elements of the array's size.
    """
    if not out.nbytes:
        return
    span = as_slice(rows)
    if span is not None:
        found = array[span]
    elif array.flags.c_contiguous:
        found = np.take(_opaque(array), rows, axis=0, mode="clip").view(array.dtype)
    elif array.flags.f_contiguous:  # element by element of the row, so that each of the array's runs is passed once
        found = np.take(_opaque(array).T, rows, axis=-1, mode="clip").view(array.dtype).T
    else:
        found = array[rows]
    np.copyto(_like(array, out), found)


def scatter_array(array: NDArray[Any], rows: NDArray[np.int64], values: torch.Tensor) -> None:
    """``array[rows[i]] = values[i]``, into the array's byte order; no other byte of it is written.

    Args:
        array: as for ``gather_array``, writable.
        rows: 1-d, in ``[0, n)``, distinct.
        values: ``(len(rows), *row_shape)``, C-contiguous, on the CPU, of elements of the array's size.
    """
    if not values.nbytes:
        return
    span = as_slice(rows)
    array[rows if span is None else span] = _like(array, values)


def _opaque(array: NDArray[Any]) -> NDArray[Any]:
    """Elements without alignment or byte order: NumPy would copy the whole of an unaligned array before it takes rows."""
    return array.view(f"V{array.dtype.itemsize}")


def _like(array: NDArray[Any], tensor: torch.Tensor) -> NDArray[Any]:
    """``tensor``'s memory as an array of ``array``'s dtype in native byte order; NumPy has no bfloat16, so by bytes."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().view(array.dtype.newbyteorder("=")).reshape(tensor.shape)
