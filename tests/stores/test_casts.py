"""Casts round once, to nearest even: compared with exact arithmetic, for every pair of dtypes, on the CPU and on CUDA."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowferry.stores import ArrayStore
from rowferry.stores._casts import cast, castable


class Format(NamedTuple):
    """A binary floating-point format, by its definition."""

    precision: int
    least: int
    """Exponent of the smallest subnormal."""
    largest: Fraction


FORMATS = {
    torch.float8_e4m3fn: Format(4, -9, Fraction(448)),
    torch.float8_e5m2: Format(3, -16, Fraction(57344)),
    torch.float16: Format(11, -24, Fraction(65504)),
    torch.bfloat16: Format(8, -133, (2 - Fraction(1, 2**7)) * 2**127),
    torch.float32: Format(24, -149, (2 - Fraction(1, 2**23)) * 2**127),
    torch.float64: Format(53, -1074, (2 - Fraction(1, 2**52)) * 2**1023),
}
INTEGERS = {
    torch.bool: (0, 1),
    torch.uint8: (0, 2**8 - 1),
    torch.uint16: (0, 2**16 - 1),
    torch.uint32: (0, 2**32 - 1),
    torch.uint64: (0, 2**64 - 1),
    torch.int8: (-(2**7), 2**7 - 1),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.int64: (-(2**63), 2**63 - 1),
}
FLOAT_PAIRS = [(source, target) for source in FORMATS for target in FORMATS if source != target]
INTEGER_PAIRS = [(source, target) for source in INTEGERS for target in FORMATS]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rounded(value: Fraction, target: torch.dtype) -> float:
    """``value`` to the nearest number of ``target``, ties to even; beyond the largest one inf, or NaN where there is none."""
    precision, least, largest = FORMATS[target]
    if not value:
        return 0.0
    top, bottom = abs(value).as_integer_ratio()
    exponent = top.bit_length() - bottom.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - precision + 1, least)
    found = round(value / step) * step  # Python rounds halves to even
    if abs(found) <= largest:
        return float(found)
    return math.nan if target == torch.float8_e4m3fn else math.copysign(math.inf, value)


def wanted(value: float | int, target: torch.dtype) -> float:
    """What a cast of ``value``, which float or int holds exactly, must give."""
    if isinstance(value, int):
        return rounded(Fraction(value), target)
    if math.isnan(value) or (math.isinf(value) and target == torch.float8_e4m3fn):
        return math.nan
    return value if math.isinf(value) else math.copysign(rounded(Fraction(value), target), value)


def same(found: Tensor, values: list[float]) -> bool:
    """Equal numbers with equal signs, NaN where NaN is wanted."""
    exact, expected = found.to(torch.float64), torch.tensor(values, dtype=torch.float64)
    nan = torch.isnan(expected)
    numbers = torch.where(nan, torch.zeros(()), exact).view(torch.int64)
    return bool(torch.equal(torch.isnan(exact), nan) and numbers.equal(torch.where(nan, 0.0, expected).view(torch.int64)))


def from_bits(patterns: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(patterns, UNSIGNED[dtype.itemsize])).view(dtype)


def to_bits(number: float, dtype: torch.dtype) -> int:
    tensor = torch.tensor([number], dtype=torch.float64).to(dtype)
    return int.from_bytes(tensor.view(torch.uint8).numpy().tobytes(), sys.byteorder)


def halfway(target: torch.dtype, source: torch.dtype, number: int, nudge: int, negative: bool) -> int:
    """Bits of a ``source`` number near the middle of two neighbours in ``target``: where rounding twice shows."""
    number %= 2 ** (8 * target.itemsize - 1) - 1
    low, high = from_bits([number, number + 1], target).to(torch.float64).tolist()
    middle = (low + high) / 2 if math.isfinite(low + high) else float(FORMATS[target].largest)
    bits = to_bits(middle, source)
    top = 1 << (8 * source.itemsize - 1)
    return min(max(bits % top + nudge, 0), top - 1) + top * negative


def patterns(source: torch.dtype, target: torch.dtype) -> st.SearchStrategy[int]:
    nudges = st.sampled_from([0, *(sign * 2**k for k in (0, 1, 2, 12, 20, 27, 28, 29) for sign in (1, -1))])
    near = st.builds(halfway, st.just(target), st.just(source), st.integers(0, 2**63 - 1), nudges, st.booleans())
    return st.integers(0, 2 ** (8 * source.itemsize) - 1) | near


def whole_numbers(source: torch.dtype, target: torch.dtype) -> st.SearchStrategy[int]:
    """Any, and such as lie near the middle of two neighbours in ``target``."""
    low, high = INTEGERS[source]
    half = 2 ** FORMATS[target].precision
    near = st.builds(
        lambda odd, shift, nudge, sign: min(max(sign * ((odd << shift) + nudge), low), high),
        st.integers(half // 2, half - 1).map(lambda number: 2 * number + 1),
        st.integers(0, 63 - FORMATS[target].precision),
        st.integers(-1, 1),
        st.sampled_from([1, -1]),
    )
    return st.integers(low, high) | near


@pytest.mark.parametrize(("source", "target"), FLOAT_PAIRS)
def test_every_number_rounds_once_to_the_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    @settings(max_examples=12, deadline=None, database=None)
    @given(st.lists(patterns(source, target), min_size=30, max_size=60))
    def check(chosen: list[int]) -> None:
        values = from_bits(chosen, source)
        found = cast(values, target)
        assert found.dtype == target
        assert same(found, [wanted(each, target) for each in values.to(torch.float64).tolist()])

    check()


@pytest.mark.parametrize(("source", "target"), INTEGER_PAIRS)
def test_every_integer_rounds_once_to_the_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    @settings(max_examples=12, deadline=None, database=None)
    @given(st.lists(whole_numbers(source, target), min_size=30, max_size=60))
    def check(chosen: list[int]) -> None:
        found = cast(torch.tensor(chosen, dtype=source), target)
        assert found.dtype == target
        assert same(found, [wanted(each, target) for each in chosen])

    check()


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", FORMATS)
def test_all_numbers_of_8_bits_are_cast_right(source: torch.dtype, target: torch.dtype) -> None:
    values = from_bits(range(256), source)
    assert same(cast(values, target), [wanted(each, target) for each in values.to(torch.float64).tolist()])


def test_the_edges_of_half_precision_are_those_of_ieee() -> None:
    values = [65504, 65519.996, 65520, 2**-24, 2**-25, 1 + 2**-11, 1 + 3 * 2**-11]
    expected = [65504, 65504, math.inf, 2**-24, 0, 1, 1 + 2**-9]
    for source in (torch.float32, torch.float64):
        assert same(cast(torch.tensor(values, dtype=source), torch.float16), expected)


def test_float64_is_not_rounded_by_way_of_float32() -> None:
    value = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert cast(value, torch.float16).tolist() == [1 + 2**-10]


def test_what_float8_cannot_hold_becomes_nan_or_inf_in_every_torch() -> None:
    values = torch.tensor([448, 464, 464.0001, 480, -1e9, math.inf])
    assert same(cast(values, torch.float8_e4m3fn), [448, 448, *[math.nan] * 4])
    values = torch.tensor([57344, 61439.99, 61440, -1e9, math.inf])
    assert same(cast(values, torch.float8_e5m2), [57344, 57344, math.inf, -math.inf, math.inf])


@pytest.mark.parametrize(("source", "target"), [*FLOAT_PAIRS, (torch.int64, torch.float16), (torch.uint64, torch.float32)])
def test_tensors_of_any_shape_and_stride_keep_theirs(source: torch.dtype, target: torch.dtype) -> None:
    numbers = (torch.arange(24.0, dtype=torch.float64) % 5).reshape(4, 6)  # exact in every dtype
    values = numbers.to(source)
    for view in (values, values.T, values[::2, 1::3], values[0, 0], values[:0]):
        found = cast(view, target)
        assert found.shape == view.shape
        assert found.to(torch.float64).equal(view.to(torch.float64))
    assert values.to(torch.float64).equal(numbers)


def test_a_cast_to_the_same_dtype_is_the_tensor_itself() -> None:
    values = torch.ones(3)
    assert cast(values, torch.float32) is values


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float64, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e5m2),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_gradients_come_back_in_the_dtype_of_the_source(source: torch.dtype, target: torch.dtype) -> None:
    leaf = torch.ones(3, dtype=source, requires_grad=True)
    cast(leaf, target).to(torch.float32).mul(2).sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    assert leaf.grad is not None
    assert leaf.grad.dtype == source
    assert leaf.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("source", "target", "lost"),
    [
        (torch.complex64, torch.float32, "imaginary"),
        (torch.complex128, torch.int64, "imaginary"),
        (torch.float32, torch.int32, "fractions"),
        (torch.float16, torch.bool, "fractions"),
        (torch.float8_e5m2, torch.uint8, "fractions"),
    ],
)
def test_casts_that_would_lose_a_part_are_refused_by_name(source: torch.dtype, target: torch.dtype, lost: str) -> None:
    with pytest.raises(TypeError, match=f"{source} to {target}.*{lost}"):
        castable(source, target)


@pytest.mark.parametrize("source", [*FORMATS, *INTEGERS])
@pytest.mark.parametrize("target", [*FORMATS, torch.complex64])
def test_real_numbers_may_become_any_floating_or_complex_dtype(source: torch.dtype, target: torch.dtype) -> None:
    castable(source, target)
    castable(source, source)


def test_a_store_rounds_written_values_once_and_refuses_what_would_lose() -> None:
    store = ArrayStore(torch.zeros(2, 1, dtype=torch.float16))
    store.scatter([0], torch.tensor([[1 + 2**-11 + 2**-40]], dtype=torch.float64))
    store.copy_from(ArrayStore(store.gather([0, 0]).to(torch.float64) + 2**-11 + 2**-40))
    assert store.gather([0, 1]).tolist() == [[1 + 2**-9], [1 + 2**-9]]
    counts = ArrayStore(torch.zeros(2, 1, dtype=torch.int64))
    for write in (lambda: counts.scatter([0], torch.ones(1, 1)), lambda: counts.copy_from(store)):
        with pytest.raises(TypeError, match=f"{counts.name}.*fractions"):
            write()
    assert counts.gather([0, 1]).tolist() == [[0], [0]]


# ---- on a GPU -----------------------------------------------------------------------------------------------


def hard_values(source: torch.dtype) -> Tensor:
    """All bit patterns of 16 bits and fewer; a million random ones and those near the middle of two numbers, of more."""
    rng = np.random.default_rng(5)
    if source.itemsize < 4:
        return from_bits(np.arange(2 ** (8 * source.itemsize)), source)
    size = 8 * source.itemsize
    random = rng.integers(0, 2**size, 1_000_000, UNSIGNED[source.itemsize], endpoint=False)
    if source in INTEGERS:
        low, high = INTEGERS[source]
        edges = [low, high, 0, *(min(2**k + d, high) for k in range(size) for d in (-1, 0, 1))]
        return torch.cat([from_bits(random, source), torch.tensor(edges, dtype=source)])
    nudges = [0, 1, -1, 2**12, -(2**12), 2**28, -(2**28)]
    near = [
        halfway(target, source, int(number), nudge, bool(number & 1))
        for target in FORMATS
        for number in rng.integers(0, 2**63 - 1, 200)
        for nudge in nudges
    ]
    return from_bits(np.concatenate([random, np.array(near, random.dtype)]), source)


@pytest.mark.gpu
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", [*FORMATS, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64])
def test_the_bits_on_cuda_are_those_on_the_cpu(source: torch.dtype, target: torch.dtype) -> None:
    values = hard_values(source)
    here, there = cast(values, target), cast(values.cuda(), target).cpu()
    nan = torch.isnan(here.to(torch.float32))
    assert torch.isnan(there.to(torch.float32)).equal(nan)
    bits = AS_INTEGERS[target.itemsize]
    assert here.view(bits)[~nan].equal(there.view(bits)[~nan])
