"""Casts that host threads make have the bits of those that the device makes, without a warning or a thread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rowferry.stores._casts import cast
from rowferry.stores._casts_on_host import cast_on_host, casts_on_host

PAIRS = [(torch.float64, torch.float32), (torch.float64, torch.float16), (torch.float32, torch.float16)]
INTS = {2: torch.int16, 4: torch.int32}


def special(dtype: torch.dtype) -> torch.Tensor:
    """Ties, limits, subnormals, infinities, zeros of both signs, NaN; and numbers that round twice to something else."""
    halves = torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(torch.float16).to(dtype)
    steps = torch.tensor([1.0, 1 + 2**-11, 1 - 2**-12, 1 + 2**-11 + 2**-22, 1 + 2**-24 + 2**-50, 2.0**-30], dtype=dtype)
    return torch.cat([halves * step for step in steps] + [torch.tensor([3e38, -1e39, 1e-46, 65_519.99, 65_520.0]).to(dtype)])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_special_numbers_have_the_same_bits(source: torch.dtype, target: torch.dtype) -> None:
    values = special(source)
    out = torch.empty(values.shape, dtype=target)
    cast_on_host(values, out)
    wanted, number = cast(values, target), ~values.isnan()
    assert torch.equal(out.isnan(), values.isnan())
    bits = INTS[target.itemsize]
    assert torch.equal(out.view(bits)[number], wanted.view(bits)[number])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_random_bits_have_the_same_bits(source: torch.dtype, target: torch.dtype) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 400_000 * source.itemsize, np.uint8)
    values = torch.from_numpy(raw).view(source).view(-1, 100)
    out = torch.empty(values.shape, dtype=target)
    cast_on_host(values, out)
    number, bits = ~values.isnan(), INTS[target.itemsize]
    assert torch.equal(out.view(bits)[number], cast(values, target).view(bits)[number])


def test_only_narrower_floats_that_numpy_has_are_cast() -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.int8)
    assert [(a, b) for a in dtypes for b in dtypes if casts_on_host(a, b)] == PAIRS
