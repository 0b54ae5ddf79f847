"""The keyed permutation: a bijection, well mixed, the same everywhere, cheap at any n."""

from __future__ import annotations

import math
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowferry.pipeline._shuffle import CUDA_SOURCE, MOST_ROWS, Permutation

EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 97, 1023, 1024, 1025, 65535, 65536, 65537, 99991, 1 << 20]


def whole(n: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return Permutation(n, seed, epoch)(np.arange(n))


def excess(counts: NDArray[np.int64]) -> float:
    """Chi-square against equal counts, in standard deviations above what chance gives."""
    mean, freedom = counts.mean(), counts.size - 1
    return float((((counts - mean) ** 2 / mean).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", EDGES)
def test_every_row_comes_exactly_once(n: int) -> None:
    assert np.array_equal(np.sort(whole(n, seed=3, epoch=1)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(), epoch=st.integers())
def test_every_row_comes_once_whatever_the_size_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, MOST_ROWS), seed=st.integers(), data=st.data())
def test_rows_of_a_huge_order_are_in_range_and_distinct(n: int, seed: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True)), np.int64)
    rows = Permutation(n, seed, 0)(places)
    assert rows.min() >= 0
    assert rows.max() < n
    assert np.unique(rows).size == rows.size


def test_a_part_of_the_order_is_that_part_of_the_whole() -> None:
    order, rows = Permutation(100_003, 1, 2), whole(100_003, 1, 2)
    for start, stop in [(0, 1), (5, 5), (99_000, 100_003), (10, 50_000)]:
        assert np.array_equal(order(np.arange(start, stop)), rows[start:stop])
    places = np.random.default_rng(0).integers(0, 100_003, (7, 11), dtype=np.int32)
    assert np.array_equal(order(places), rows[places])


def test_positions_are_neither_changed_nor_shared() -> None:
    places = np.arange(1000)[::-1]
    rows = Permutation(1000, 0, 0)(places)
    assert np.array_equal(places, np.arange(1000)[::-1])
    assert not np.shares_memory(rows, places)
    assert rows.dtype == np.int64
    assert rows.flags.c_contiguous


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "last"),
    [
        (10, 0, 0, [7, 8, 5, 3, 1, 2]),
        (1000, 0, 0, [471, 110, 508, 468, 570, 67]),
        (10**6, 7, 3, [697737, 418531, 543330, 120183, 117019, 629219]),
        (10**9, -1, 0, [614374554, 897607821, 516080404, 799350064, 133947884, 15860152]),
        (2**40, 2**70, 5, [816365943036, 554321347145, 941403931, 631802086688, 375826937126, 1054414084962]),
    ],
)
def test_orders_never_change_between_versions_and_machines(n: int, seed: int, epoch: int, last: list[int]) -> None:
    assert Permutation(n, seed, epoch)(np.arange(n - 6, n)).tolist() == last


def test_seeds_and_epochs_of_any_size_and_sign_give_different_orders() -> None:
    numbers = [0, 1, -1, 2, -2, 2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 10**30, -(10**30)]
    orders = {tuple(whole(64, seed, epoch)) for seed in numbers for epoch in numbers}
    assert len(orders) == len(numbers) ** 2


def test_two_epochs_agree_at_about_one_place() -> None:
    agreements = [int((whole(5000, seed, 0) == whole(5000, seed, 1)).sum()) for seed in range(100)]
    assert 0.6 < np.mean(agreements) < 1.4


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_rows_is_equally_likely(n: int) -> None:
    counts = Counter(tuple(whole(n, seed).tolist()) for seed in range(100 * math.factorial(n)))
    assert len(counts) == math.factorial(n)
    assert excess(np.array(list(counts.values()))) < 5


@pytest.mark.parametrize("n", [7, 9, 25, 100])
def test_odd_and_even_orders_are_equally_likely(n: int) -> None:
    """Rounds over two odd halves would make even permutations only."""
    odd = 0
    for seed in range(400):
        rows, cycles, seen = whole(n, seed).tolist(), 0, set[int]()
        for start in range(n):
            cycles += start not in seen
            while start not in seen:
                seen.add(start)
                start = rows[start]
        odd += (n - cycles) % 2
    assert 150 < odd < 250


def test_the_first_row_of_an_order_is_uniform_over_seeds() -> None:
    first = np.array([Permutation(1 << 20, seed, 0)(np.zeros(1, np.int64))[0] for seed in range(4000)])
    assert excess(np.bincount(first * 40 >> 20, minlength=40)) < 5


@pytest.mark.parametrize("n", [1024, 65_536, 65_537, 10**6, 10**9])
def test_neighbours_in_the_order_are_unrelated(n: int) -> None:
    rows = Permutation(n, 5, 0)(np.arange(min(n, 100_000)))
    steps = np.diff(rows) % n
    assert excess(np.bincount(steps * 50 // n, minlength=50)) < 5
    halves = rows * 8 // n
    assert excess(np.bincount(halves[:-1] * 8 + halves[1:], minlength=64)) < 5


def test_a_batch_of_a_billion_rows_costs_memory_for_the_batch_only() -> None:
    tracemalloc.start()
    try:
        Permutation(10**9, 0, 0)(np.arange(65_536))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_one_object_serves_several_threads() -> None:
    order, wanted = Permutation(300_000, 1, 1), whole(300_000, 1, 1)
    results: dict[int, NDArray[np.int64]] = {}

    def evaluate(number: int) -> None:
        results[number] = order(np.arange(number * 50_000, (number + 1) * 50_000))

    threads = [threading.Thread(target=evaluate, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(np.concatenate([results[number] for number in range(6)]), wanted)


def test_bad_sizes_seeds_and_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 rows"):
        Permutation(-1, 0, 0)
    with pytest.raises(ValueError, match=r"2\*\*62"):
        Permutation(MOST_ROWS + 1, 0, 0)
    with pytest.raises(TypeError):
        Permutation(10, 0.5, 0)  # type: ignore[arg-type]
    order = Permutation(10, 0, 0)
    for places in ([10], [-1], [0, 2**62]):
        with pytest.raises(IndexError, match="order of 10 rows"):
            order(np.array(places))
    with pytest.raises(TypeError, match="float64"):
        order(np.array([1.0]))


def test_the_repr_tells_what_the_order_is_keyed_by() -> None:
    assert repr(Permutation(10, 3, 4)) == "Permutation(n=10, seed=3, epoch=4)"


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles(architecture: str, compile_cuda: Callable[..., str]) -> None:
    assert compile_cuda(CUDA_SOURCE, architecture) == ""


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 65_537, 2**31 + 11, 2**40])
def test_the_kernel_run_by_the_host_gives_the_rows_that_numpy_gives(n: int, kernels_on_host: Callable[..., Any]) -> None:
    launch = kernels_on_host(CUDA_SOURCE, ("permute_range",))["permute_range"]
    order, count = Permutation(n, -9, 4), min(n, 5000)
    parameters = [number - (1 << 64) if number >> 63 else number for number in order.parameters()]
    wide, narrow = np.empty(count, np.int64), np.empty(count, np.int32)
    launch(1, n - count, count, *parameters, 1, wide.ctypes.data)
    assert np.array_equal(wide, order(np.arange(n - count, n)))
    launch(1, 0, count, *parameters, 0, narrow.ctypes.data)
    assert np.array_equal(narrow, order(np.arange(count)).astype(np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 7, 1000, 65_537, 10**6, 2**31 + 11, 2**40])
def test_the_kernel_gives_the_rows_that_numpy_gives(n: int) -> None:
    import cupy

    kernel = cupy.RawModule(code=CUDA_SOURCE).get_function("permute_range")
    order = Permutation(n, -9, 4)
    count = min(n, 50_000)
    for wide, dtype in ((1, np.int64), (0, np.int32)):
        if not wide and n > 2**31:
            continue
        out = cupy.empty(count, dtype)
        arguments = [np.int64(n - count), np.int64(count), *map(np.uint64, order.parameters()), np.int64(wide), out]
        kernel((32,), (256,), tuple(arguments))
        assert np.array_equal(out.get(), order(np.arange(n - count, n)))
