"""What stores in memory share: check a shape, know an array's layout, copy it in by pieces, tell memory from memory."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ._contract import Store


def check_layout(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """``shape`` as plain ints, for rows of ``dtype``.

    Raises:
        ValueError: no dimension, or a negative one. TypeError: not integers, or not a torch dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {dtype!r} is not a torch dtype; pass torch.float32 or the like")
    dims = tuple(operator.index(each) for each in shape)
    if not dims or min(dims) < 0:
        raise ValueError(f"shape {dims} is not (rows, *row_shape): at least one dimension, none of them negative")
    return dims


def layout_of(array: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and torch dtype of a NumPy, torch or CuPy array. Reads no rows.

    Raises:
        TypeError: another kind of object, or a dtype that torch does not have.
    """
    if isinstance(array, torch.Tensor):
        dtype = array.dtype
    elif isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__"):
        wanted = np.dtype(array.dtype).newbyteorder("=")
        try:
            dtype = torch.from_numpy(np.empty(0, wanted)).dtype
        except TypeError as error:
            raise TypeError(f"torch has no dtype like NumPy's {wanted}; convert the array first, or view its bits") from error
    else:
        raise TypeError(f"a {type(array).__name__} is not an array of rows; pass a NumPy, torch or CuPy array")
    return check_layout(array.shape, dtype), dtype


def fill(store: Store, array: Any) -> None:
    """Copy ``array``, of the store's shape and dtype, into ``store.memory``, in pieces of at most 64 MiB.

    Any strides, byte order and device. Returns when the copy has landed, for a CPU store also one from a GPU.
    """
    memory = store.memory
    assert memory is not None  # only stores in memory are filled
    source = array.detach() if isinstance(array, torch.Tensor) else array
    if not isinstance(array, np.ndarray | torch.Tensor):
        source = torch.as_tensor(array)  # CuPy: a view on its device
    for start, stop in store.spans():
        piece = source[start:stop]
        if isinstance(piece, np.ndarray):  # a copy in native order; torch takes no other, and warns of read-only ones
            piece = torch.from_numpy(np.array(piece, dtype=piece.dtype.newbyteorder("="), order="C"))
        memory[start:stop].copy_(piece)


def identity_of(memory: torch.Tensor) -> Hashable:
    """Equal for two tensors over the same memory, all of it; distinct for two that hold nothing."""
    if not memory.nbytes:
        return ("memory", id(memory))
    return ("memory", str(memory.device), memory.data_ptr())
