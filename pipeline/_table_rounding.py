"""Stochastic rounding whose dice are a pure function of (seed, batch, row, element), so that no schedule changes it."""

from __future__ import annotations

import torch
from torch import Tensor

from rowferry.stores._casts import cast

_BITS = {1: torch.int8, 2: torch.int16}
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio, odd: multiples of it are spread evenly
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of the SplitMix64 finaliser


def rounds(dtype: torch.dtype) -> bool:
    """Whether float32 weights lose bits in stores of ``dtype``."""
    return dtype.is_floating_point and dtype.itemsize in _BITS


def round_stochastically(values: Tensor, dtype: torch.dtype, *, rows: Tensor, seed: int, batch: int) -> Tensor:
    """``values`` as ``dtype``, each element one of its two neighbours there, with the exact value as expectation.

    Args:
        values: float32, ``(n, *row_shape)``, any device; not changed.
        dtype: float16, bfloat16 or a float8.
        rows: int64 ``(n,)``: the row numbers of ``values``.
        seed, batch: the other keys; ``batch`` is counted over all epochs.

    Values that ``dtype`` has stay as they are; what is beyond its range, and NaN, goes as in rounding to nearest. A fresh
    tensor, on the current stream, no host sync.
    """
    near = cast(values, dtype)
    bits = _BITS[dtype.itemsize]
    size = values.abs()
    # Sign and magnitude: one less in the bits is one step towards zero, for either sign.
    towards = near.view(bits) - (near.to(torch.float32).abs() > size).to(bits)
    away = towards + 1
    low, high = (side.view(dtype).to(torch.float32).abs() for side in (towards, away))
    share = (size - low) / (high - low)
    chosen = torch.where(_uniform(values, rows, seed, batch) < share, away, towards).view(dtype)
    usable = torch.isfinite(near.to(torch.float32))
    return torch.where(usable, chosen.view(bits), near.view(bits)).view(dtype)


def _uniform(values: Tensor, rows: Tensor, seed: int, batch: int) -> Tensor:
    """Numbers in [0, 1), multiples of 2**-24, in the shape of ``values``."""
    per_row = values[0].numel() if len(values) else 1
    element = torch.arange(per_row, device=values.device, dtype=torch.int64)
    key = _mixed_number(_mixed_number(seed) ^ batch)
    place = rows.view(-1, 1) * per_row + element
    hashed = _mixed(place * _signed(_GOLDEN) + _signed(key))
    return (_shifted(hashed, 40).to(torch.float32) * 2.0**-24).view(values.shape)


def _mixed(number: Tensor) -> Tensor:
    number = (number ^ _shifted(number, 30)) * _signed(_FIRST)
    number = (number ^ _shifted(number, 27)) * _signed(_SECOND)
    return number ^ _shifted(number, 31)


def _mixed_number(number: int) -> int:
    """``_mixed`` of a Python number, after one golden step so that 0 is not kept."""
    mask = (1 << 64) - 1
    number = (number + _GOLDEN) & mask
    number = ((number ^ (number >> 30)) * _FIRST) & mask
    number = ((number ^ (number >> 27)) * _SECOND) & mask
    return number ^ (number >> 31)


def _shifted(number: Tensor, places: int) -> Tensor:
    """A logical shift to the right of an int64."""
    return (number >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same bits."""
    return number - (1 << 64) if number >> 63 else number
