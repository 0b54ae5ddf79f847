"""Rows of flat bytes, as NumPy moves them. No torch: files are recovered, and killed in tests, without it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDEST_RECORD = 1 << 20  # wider rows are copied as fast in two dimensions, and no NumPy limits those to 2 GiB


def as_records(flat: NDArray[np.uint8], row_nbytes: int) -> NDArray[Any]:
    """The same memory with one opaque element a row, which NumPy copies whole; it holds at least one byte."""
    return flat.view(f"V{row_nbytes}") if row_nbytes <= _WIDEST_RECORD else flat.reshape(-1, row_nbytes)


def as_slice(rows: NDArray[np.int64]) -> slice | None:
    """``rows`` as a slice when each is one more than the one before; None when they are not, or when there are none."""
    if not rows.size or int(rows[-1]) - int(rows[0]) != rows.size - 1 or not bool(np.all(rows[1:] - rows[:-1] == 1)):
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)


def runs(rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Where each run of consecutive rows starts among ``rows``, and how long it is."""
    edges = np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1
    starts = np.concatenate(([0], edges))
    return starts, np.diff(np.concatenate((starts, [len(rows)])))


def scatter_records(target: NDArray[Any], rows: NDArray[np.int64], source: NDArray[Any]) -> None:
    """``target[rows[i]] = source[i]``, distinct rows; no other byte of ``target`` is written."""
    span = as_slice(rows)
    if span is not None:
        np.copyto(target[span], source)
    else:
        target[rows] = source
