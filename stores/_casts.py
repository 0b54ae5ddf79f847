"""Casts that round once, to nearest even, with the same bits on host and device. Torch operators only.

Torch converts float64 to float16, bfloat16 and float8 by way of float32, so it rounds twice (1 + 2**-11 + 2**-40 ends
as 1 instead of 1 + 2**-10 in float16). Here float64 first becomes a float32 *rounded to odd*: truncated, with the last
bit set when anything was lost. A second rounding to 22 bits or fewer is then exact (Boldo and Melquiond, "Emulation of
FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008).
Integers that float32 cannot hold go the same way.

NaN stays NaN (its payload is not kept). What is too large becomes inf; float8_e4m3fn has no inf, there it becomes NaN
(torch up to 2.11 does the same, later ones give the largest number instead, so it is settled here).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
_WIDE_INTEGERS = frozenset({torch.int32, torch.int64, torch.uint32, torch.uint64})

# The least float32 that rounds past the largest number, and the bits that then stand beside the sign.
_TOO_LARGE = {torch.float8_e4m3fn: (464 + 2**-15, 0x7F), torch.float8_e5m2: (61440.0, 0x7C)}


def castable(source: torch.dtype, target: torch.dtype, name: str = "") -> None:
    """Refuse casts that lose what they should not, of values for the store of that ``name`` where there is one.

    Raises:
        TypeError: complex to real, or a floating dtype to an integer or bool.
    """
    lead = f"values do not fit {name}: " if name else ""
    if source.is_complex and not target.is_complex:
        raise TypeError(
            f"{lead}cannot cast {source} to {target}: the imaginary part would be lost; take .real or .abs() yourself"
        )
    if source.is_floating_point and not (target.is_floating_point or target.is_complex):
        raise TypeError(f"{lead}cannot cast {source} to {target}: fractions would be lost; round and cast yourself")


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` as ``dtype``, rounded once. The tensor itself when it has that dtype already; else a new one.

    On the current stream; no host sync; differentiable where torch's own ``to`` is.
    """
    if tensor.dtype == dtype:
        return tensor
    if _torch_rounds_once(tensor.dtype, dtype):
        return tensor.to(dtype)
    if tensor.requires_grad:
        rounded: Tensor = _Rounding.apply(tensor, dtype)  # type: ignore[no-untyped-call, unused-ignore]
        return rounded
    return _rounded(tensor, dtype)


def _torch_rounds_once(source: torch.dtype, target: torch.dtype) -> bool:
    if target in _TOO_LARGE:
        return False
    if target in _NARROW:
        return source != torch.float64 and source not in _WIDE_INTEGERS
    return target != torch.float32 or source not in _WIDE_INTEGERS


class _Rounding(torch.autograd.Function):
    """``_rounded`` with the gradient of ``to``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.source = tensor.dtype
        return _rounded(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.source), None


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` as float32 or a narrower ``dtype``, by way of numbers rounded to odd."""
    if tensor.dtype in _WIDE_INTEGERS:
        tensor = _integers_to_odd(tensor)
    if dtype == torch.float32:
        return tensor.to(dtype)
    if tensor.dtype == torch.float64:
        tensor = _rounded_to_odd(tensor)
    if dtype not in _TOO_LARGE:
        return tensor.to(dtype)
    single = tensor.to(torch.float32)
    limit, beyond = _TOO_LARGE[dtype]
    bits = single.to(dtype).view(torch.uint8)
    return torch.where(single.abs() >= limit, (bits & 0x80) | beyond, bits).view(dtype)


def _rounded_to_odd(tensor: Tensor) -> Tensor:
    """float64 as float32 rounded to odd; NaN and inf kept."""
    nearest = tensor.to(torch.float32)
    back = nearest.to(torch.float64)
    lost = (back != tensor) & ~torch.isnan(tensor)
    away = back.abs() > tensor.abs()  # rounded up in magnitude: one step towards zero truncates
    bits = nearest.view(torch.int32)
    odd = (bits - away.to(torch.int32)) | 1
    return torch.where(lost, odd, bits).view(torch.float32)


def _integers_to_odd(tensor: Tensor) -> Tensor:
    """Integers as float64 rounded to odd: exact below 2**53, above it with a sticky last bit."""
    if tensor.dtype == torch.uint64:
        signed = tensor.view(torch.int64)
        half = ((signed >> 1) & 0x7FFFFFFFFFFFFFFF) | (signed & 1)
        return torch.where(signed >= 0, _signed_to_odd(signed), _signed_to_odd(half) * 2)
    return _signed_to_odd(tensor.to(torch.int64))


def _signed_to_odd(tensor: Tensor) -> Tensor:
    """The low 12 bits of large numbers become one sticky bit, so what is left has at most 52 and is exact in float64."""
    sticky = (tensor >> 12) | ((tensor & 0xFFF) != 0).to(torch.int64)
    large = (tensor >= 1 << 52) | (tensor <= -(1 << 52))
    return torch.where(large, sticky.to(torch.float64) * 4096, tensor.to(torch.float64))
