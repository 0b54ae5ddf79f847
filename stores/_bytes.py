"""Rows of C-contiguous host memory, moved as bytes: any dtype, nothing goes through arithmetic.

Guarantees:
- Each function is one NumPy call that releases the GIL and starts no thread, whatever the number of rows.
- Bits stay as they are, NaN payloads and negative zeros too.

Assumes:
- Row numbers are checked already: in range, and distinct for ``scatter_rows``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ._records import as_records, as_slice, scatter_records


def gather_rows(memory: torch.Tensor, rows: NDArray[np.int64], out: torch.Tensor) -> None:
    """``out[i] = memory[rows[i]]``.

    Args:
        memory: ``(n, *row_shape)``, C-contiguous, on the CPU, of any dtype and alignment.
        rows: 1-d, in ``[0, n)``, any order, repeats allowed.
        out: ``(len(rows), *row_shape)`` of the same dtype, C-contiguous, on the CPU, apart from ``memory``.
    """
    if not out.nbytes:
        return
    source, target = _records(memory), _records(out)
    span = as_slice(rows)
    if span is not None:
        np.copyto(target, source[span])
    else:
        np.take(source, rows, axis=0, out=target, mode="clip")  # any other mode fills a buffer before it fills out


def scatter_rows(memory: torch.Tensor, rows: NDArray[np.int64], values: torch.Tensor) -> None:
    """``memory[rows[i]] = values[i]``; no other byte of ``memory`` is written.

    Args:
        memory: as for ``gather_rows``, writable.
        rows: 1-d, in ``[0, n)``, distinct.
        values: ``(len(rows), *row_shape)`` of the same dtype, C-contiguous, on the CPU, apart from ``memory``.
    """
    if not values.nbytes:
        return
    scatter_records(_records(memory), rows, _records(values))


def _records(tensor: torch.Tensor) -> NDArray[Any]:
    """The same memory with one opaque element a row, which NumPy copies whole; it holds at least one byte."""
    flat = tensor.detach().view(-1).view(torch.uint8).numpy()
    return as_records(flat, flat.size // len(tensor))


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size (complex128 stays): what every operator can move, bit for bit."""
    return tensor if tensor.dtype.itemsize == 16 else tensor.view(_INTS[tensor.dtype.itemsize])


def apart(values: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """``values``, copied where they lie in ``memory``: rows of a table that are written into it are all read first."""
    if memory is None or values.device != memory.device:
        return values
    first, other = values.untyped_storage(), memory.untyped_storage()
    start, begin = first.data_ptr(), other.data_ptr()
    return values.clone() if start < begin + other.nbytes() and begin < start + first.nbytes() else values
