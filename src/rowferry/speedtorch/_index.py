"""Row numbers as scripts pass them: positives first, then negatives, in C order; slot i of the batch holds row i of these."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores._rows import to_host

Flat = Tensor | NDArray[Any]


def flatten(positive: Any, negative: Any = None) -> Flat:
    """``positive.reshape(-1)``, then ``negative.reshape(-1)``; a tensor when all of it is on a GPU, else a NumPy array.

    May share the caller's memory. NumPy, torch and CuPy arrays of any integer type and shape, and lists.
    """
    parts = [each for each in (positive, negative) if each is not None]
    if all(isinstance(each, Tensor) and each.is_cuda for each in parts):
        flat = [each.detach().reshape(-1) for each in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat)
    arrays = [to_host(each, 0).reshape(-1) for each in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def same(one: Flat, other: Flat) -> bool:
    """Whether both name the same rows in the same order. Waits for the device when both are there."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(np.array_equal(to_host(one, 0), to_host(other, 0)))
