"""Row numbers: check them, split them. Pure: no I/O, no device, nothing kept."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ._records import as_slice as as_slice

_CLOSE = 8  # places that numbers may be spread over for each of them, for marks to be cheaper than sorting


def check_index(index: Any, n: int, name: str, *, negative: bool = True) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """The rows that ``index`` names in a table of ``n`` rows, and the index's shape.

    Args:
        index: an int, list, range, slice, NumPy, torch (any device) or CuPy array of any integer type and shape,
            or a bool mask of length ``n``.
        n: rows of the table.
        name: what errors call the table.
        negative: whether negative numbers count from the end (else they are out of range).

    Returns:
        ``(rows, shape)``: int64, 1-d, in ``[0, n)``, C order of the index; may share the caller's memory, so it
        is read and never written or kept.

    Raises:
        IndexError: out of range, or a mask of another length. TypeError: neither integers nor bools.
    """
    array = to_host(index, n)
    if array.dtype == np.bool_:
        if array.shape != (n,):
            raise IndexError(f"bool mask of shape {array.shape} for {name}: a mask must have shape ({n},), one value a row")
        rows = np.flatnonzero(array)
        return rows, rows.shape
    if array.dtype.kind not in "iu":
        if array.size == 0:
            return np.empty(0, np.int64), array.shape
        raise TypeError(f"index for {name} is of {array.dtype}; row numbers must be integers, or a bool mask of length {n}")
    flat = array.reshape(-1)
    if flat.size and not _all_below(flat, n):
        low, high = int(flat.min()), int(flat.max())
        if low < (-n if negative else 0) or high >= n:
            bad = high if high >= n else low
            allowed = f"{-n if negative else 0} to {n - 1}" if n else "none, it has no rows"
            raise IndexError(f"row {bad} is out of range for {name} with {n} rows (allowed: {allowed})")
        flat = flat.astype(np.int64, copy=False)
        flat = np.where(flat < 0, flat + n, flat)
    return np.ascontiguousarray(flat, dtype=np.int64), array.shape


def _all_below(flat: NDArray[Any], n: int) -> bool:
    """Whether all are in ``[0, n)``, in one pass: as unsigned numbers, negative ones are the largest."""
    if n > 1 << (8 * flat.itemsize - 1):  # a negative one could be below n
        return False
    return int(flat.view(flat.dtype.str.replace("i", "u")).max()) < n


def to_host(index: Any, n: int) -> NDArray[Any]:
    """``index`` as a NumPy array of its own shape and type, without a copy where it is one already."""
    if isinstance(index, slice):
        return np.arange(*index.indices(n))
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step)
    if isinstance(index, torch.Tensor):
        if index.dtype.is_floating_point or index.dtype.is_complex:  # some have no NumPy dtype, and none is an index
            return np.empty(index.shape, np.float64)
        return np.asarray(index.detach().cpu().numpy())
    if hasattr(index, "__cuda_array_interface__"):
        return np.asarray(index.get())
    if isinstance(index, bool):
        raise TypeError("a bool is not a row number; a mask must have one value a row")
    if not isinstance(index, np.ndarray) and hasattr(index, "__index__"):
        return np.asarray(operator.index(index))
    return np.asarray(index)


def last_of_each(rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Positions of the last occurrence of each row, ascending; None when all rows are distinct."""
    distinct, first_from_end = np.unique(rows[::-1], return_index=True)
    if distinct.size == rows.size:
        return None
    return np.sort(rows.size - 1 - first_from_end)


def pieces(n: int, row_nbytes: int, limit: int, chunk_rows: int = 1) -> Iterator[tuple[int, int]]:
    """Spans ``(start, stop)`` over ``n`` rows of at most ``limit`` bytes, each of whole chunks.

    A span holds at least one chunk, also when that chunk is larger than ``limit``.
    """
    step = max(limit // max(row_nbytes * chunk_rows, 1), 1) * chunk_rows
    for start in range(0, n, step):
        yield start, min(start + step, n)


def split_sorted(rows: NDArray[np.int64], most: int, chunk_rows: int = 1) -> Iterator[tuple[int, int]]:
    """Spans ``(a, b)`` of at most ``most`` places over ascending ``rows``, cut between chunks where that is possible.

    So that a chunk is decoded once: a span ends inside a chunk only when that chunk alone has more than ``most`` rows.
    """
    start, total = 0, len(rows)
    while start < total:
        stop = min(start + most, total)
        if stop < total and chunk_rows > 1:
            edge = int(np.searchsorted(rows, rows[stop] // chunk_rows * chunk_rows))
            stop = edge if edge > start else stop
        yield start, stop
        start = stop


def spans_of(ids: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Spans over ascending ``ids`` that keep equal ones together, at most ``most`` different ones each."""
    firsts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    yield from itertools.pairwise([*firsts[::most].tolist(), ids.size])


def is_ascending(rows: NDArray[np.int64]) -> bool:
    """Whether each row is larger than the one before."""
    return bool(np.all(rows[1:] > rows[:-1]))


def ascending(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The distinct rows in order, and each row's place among them; None when ``rows`` are that already."""
    if is_ascending(rows):
        return rows, None
    distinct, inverse = np.unique(rows, return_inverse=True)
    return distinct, inverse


def rows_read_for_a_row(n: int, chunk_rows: int, window: int) -> float:
    """How many rows are read for a row used when ``window`` distinct random rows of ``n`` are read together.

    Rows come in chunks of ``chunk_rows``, each read whole, once a window. The mean, 1 at best.
    """
    window = max(min(window, n), 1)
    chunks = max(n / max(chunk_rows, 1), 1.0)
    touched = chunks * -math.expm1(window * math.log1p(-1 / chunks)) if chunks > 1 else 1.0
    return max(min(touched * chunk_rows, n) / window, 1.0)


def contiguous(rows: NDArray[np.int64]) -> bool:
    """Whether ascending distinct ``rows`` are one range."""
    return bool(rows.size) and int(rows[-1]) - int(rows[0]) + 1 == rows.size


def distinct_places(places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct places, ascending, and which of them each is."""
    if bool(np.all(places[1:] >= places[:-1])):
        new = np.concatenate(([True], places[1:] != places[:-1]))
        return places[new], np.cumsum(new) - 1
    low, high = int(places.min()), int(places.max())
    if high - low > _CLOSE * places.size:
        return np.unique(places, return_inverse=True)
    there = np.zeros(high - low + 1, np.bool_)  # close together: a mark each costs less than to sort them
    there[places - low] = True
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[places - low]
