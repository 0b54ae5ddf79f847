"""Casts by one NumPy call each, for host threads that cast rows before they cross.

Torch's own would open a pool of threads beside each of ours. NumPy rounds float64 and float32 once, to nearest even, as
``_casts.cast`` does; of the dtypes that it lacks (bfloat16, float8) nothing is cast here.
"""

from __future__ import annotations

import numpy as np
import torch

_ROUNDED_ONCE = {
    (torch.float64, torch.float32),
    (torch.float64, torch.float16),
    (torch.float32, torch.float16),
}


def casts_on_host(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``cast_on_host`` can do it, and the result is narrower: then fewer bytes cross."""
    return (source, target) in _ROUNDED_ONCE


def cast_on_host(rows: torch.Tensor, out: torch.Tensor) -> None:
    """``out[...] = rows``, the bits of ``_casts.cast`` (of NaN only that it is one). One call that releases the GIL.

    Args:
        rows: on the CPU, C-contiguous; see ``casts_on_host`` for the dtypes.
        out: of the same shape, on the CPU, C-contiguous.
    """
    with np.errstate(all="ignore"):  # what is too large becomes inf, and a NaN stays one, without a warning
        np.copyto(out.numpy(), rows.numpy(), casting="same_kind")
