"""A window's arithmetic against plain sets: counts after each batch, places, sources, each batch's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowferry.pipeline import _plan_kernels
from rowferry.pipeline._window import Layout, Older, Plan, Sorted, TorchPlan
from rowferry.pipeline._window_on_host import HostPlan

BATCHES = st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=1, max_size=5).filter(any)
OLDER = st.lists(st.sets(st.integers(0, 11), max_size=6), max_size=3)


@dataclass
class Planned:
    ids: Tensor
    ends: list[int]
    older: list[Older]
    counts: Tensor
    sizes: list[int]
    layout: Layout


def plan(
    batches: list[list[int]],
    older_rows: list[set[int]],
    dtype: torch.dtype = torch.int64,
    steps: Plan | None = None,
    device: str = "cpu",
) -> Planned:
    steps = steps or TorchPlan()
    rng = np.random.default_rng(len(batches))
    ids = torch.tensor([row for batch in batches for row in batch], dtype=dtype, device=device)
    ends = torch.tensor(np.cumsum([len(batch) for batch in batches]), device=device)
    older = [
        Older(
            torch.tensor(sorted(rows), dtype=dtype, device=device),
            torch.from_numpy(rng.permutation(len(rows)).astype(np.int64)).to(device),
        )
        for rows in older_rows
    ]
    found = Sorted(torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int64))
    counts = torch.empty((2 + len(older), len(batches)), dtype=torch.int64, device=device)
    steps.count(ids, ends, older, found, counts)
    sizes = counts[:-1, -1].tolist()
    distinct, pairs = sum(sizes), int(counts[-1, -1])

    def numbers(size: int) -> Tensor:
        return torch.full((size,), -99, device=device)

    layout = Layout(
        rows=torch.empty(distinct, dtype=dtype, device=device),
        places=numbers(len(ids)),
        older=Older(torch.empty(distinct, dtype=dtype, device=device), numbers(distinct)),
        carried=tuple(numbers(size) for size in sizes[1:]),
        batch_places=numbers(pairs),
        inverse=numbers(len(ids)),
    )
    steps.arrange(found, ends, older, sizes, layout)
    return Planned(ids, ends.tolist(), older, counts, sizes, layout)


def source_of(row: int, older_rows: list[set[int]]) -> int:
    """0 for the store, else 1 + the newest older window that holds the row."""
    return next((number + 1 for number, rows in enumerate(older_rows) if row in rows), 0)


@settings(max_examples=150, deadline=None)
@given(BATCHES, OLDER)
def test_counts_after_each_batch_are_those_of_sets(batches: list[list[int]], older_rows: list[set[int]]) -> None:
    planned = plan(batches, older_rows)
    pairs = 0
    for number, end in enumerate(planned.ends):
        held = set(planned.ids[:end].tolist())
        pairs += len(set(batches[number]))
        for line in range(len(older_rows) + 1):
            assert planned.counts[line, number] == sum(source_of(row, older_rows) == line for row in held)
        assert planned.counts[-1, number] == pairs


@settings(max_examples=150, deadline=None)
@given(BATCHES, OLDER)
def test_a_slot_holds_each_row_once_grouped_by_source(batches: list[list[int]], older_rows: list[set[int]]) -> None:
    planned = plan(batches, older_rows)
    layout, start = planned.layout, 0
    assert torch.equal(layout.rows[layout.places], planned.ids)
    for line, size in enumerate(planned.sizes):
        block = layout.rows[start : start + size].tolist()
        assert block == sorted(row for row in set(planned.ids.tolist()) if source_of(row, older_rows) == line)
        if line:  # the places to carry from are those of the same rows in the older slot
            where = dict(zip(planned.older[line - 1].places.tolist(), planned.older[line - 1].rows.tolist(), strict=True))
            assert [where[place] for place in layout.carried[line - 1].tolist()] == block
        start += size
    assert layout.older.rows.tolist() == sorted(set(planned.ids.tolist()))
    assert torch.equal(layout.rows[layout.older.places], layout.older.rows)


@settings(max_examples=150, deadline=None)
@given(BATCHES, OLDER)
def test_each_batch_finds_its_own_distinct_rows(batches: list[list[int]], older_rows: list[set[int]]) -> None:
    layout, start, first = plan(batches, older_rows).layout, 0, 0
    assert layout.batch_places is not None
    assert layout.inverse is not None
    for batch in batches:
        own = layout.rows[layout.batch_places[first : first + len(set(batch))]]
        assert own.tolist() == sorted(set(batch))
        assert own[layout.inverse[start : start + len(batch)]].tolist() == batch
        start, first = start + len(batch), first + len(set(batch))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_numbers_of_either_width_give_the_same_plan(dtype: torch.dtype) -> None:
    narrow, wide = plan([[3, 1, 3], [2]], [{1}], dtype), plan([[3, 1, 3], [2]], [{1}])
    assert narrow.layout.rows.dtype == dtype
    assert narrow.layout.rows.tolist() == wide.layout.rows.tolist() == [2, 3, 1]
    assert narrow.layout.places.tolist() == wide.layout.places.tolist()


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_kernels_of_a_plan_compile(architecture: str, compile_cuda: Callable[..., str]) -> None:
    assert compile_cuda(_plan_kernels.CUDA_SOURCE, architecture) == ""


@pytest.fixture
def on_host(kernels_on_host: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan's kernels, run by the host."""
    monkeypatch.setattr(_plan_kernels, "kernels", lambda device, source, functions: kernels_on_host(source, functions))
    return _plan_kernels.CudaPlan(torch.device("cpu"))


def assert_same(one: Planned, other: Planned) -> None:
    assert torch.equal(one.counts, other.counts)
    for mine, theirs in zip(one.layout.tensors(), other.layout.tensors(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernels_run_by_the_host_plan_as_the_operators_do(on_host: Plan, dtype: torch.dtype) -> None:
    @settings(max_examples=60, deadline=None)
    @given(BATCHES, OLDER)
    def check(batches: list[list[int]], older_rows: list[set[int]]) -> None:
        assert_same(plan(batches, older_rows, dtype, on_host), plan(batches, older_rows, dtype))

    check()


@pytest.mark.parametrize("batches", [2730, 2731])  # with two lines more than a block's own counts hold, or as many
def test_the_kernels_count_many_batches(on_host: Plan, batches: int) -> None:
    rng = np.random.default_rng(batches)
    asked = [rng.integers(0, 999, int(rng.integers(0, 3))).tolist() for _ in range(batches)]
    before = [set(range(0, 999, 7))]
    assert_same(plan(asked, before, torch.int32, on_host), plan(asked, before, torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset", [0, (1 << 31) - 12])
def test_the_host_plans_as_the_operators_do(dtype: torch.dtype, offset: int) -> None:
    @settings(max_examples=150, deadline=None)
    @given(BATCHES, OLDER)
    def check(batches: list[list[int]], older_rows: list[set[int]]) -> None:
        asked = [[row + offset for row in batch] for batch in batches]
        before = [{row + offset for row in rows} for rows in older_rows]
        assert_same(plan(asked, before, dtype, HostPlan()), plan(asked, before, dtype))

    check()


@pytest.mark.parametrize(("batches", "size", "top"), [(3, 3000, 5000), (70_000, 2, 99), (4, 50, 1 << 62)])
def test_the_host_plans_many_batches_and_the_widest_row_numbers(batches: int, size: int, top: int) -> None:
    rng = np.random.default_rng(batches)
    asked = [rng.integers(0, top, int(rng.integers(1, size + 1))).tolist() for _ in range(batches)]
    before = [set(asked[0][::2]), set(asked[-1])]
    assert_same(plan(asked, before, torch.int64, HostPlan()), plan(asked, before))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("rows", "batches", "size", "older"),
    [(5, 1, 1, 0), (40, 3, 20, 1), (1000, 7, 3000, 2), (100_000, 8, 9000, 3), (50, 3000, 7, 4), (1 << 20, 13, 40_000, 1)],
)
def test_the_kernels_plan_as_the_operators_do(dtype: torch.dtype, rows: int, batches: int, size: int, older: int) -> None:
    rng = np.random.default_rng(rows)
    asked = [rng.integers(0, rows, int(rng.integers(0, size + 1))).tolist() for _ in range(batches)]
    asked[-1].append(rows - 1)
    before = [set(rng.integers(0, rows, int(rng.integers(0, rows))).tolist()) for _ in range(older)]
    here = torch.device("cuda", torch.cuda.current_device())
    fast = plan(asked, before, dtype, _plan_kernels.CudaPlan(here), "cuda")
    assert_same(fast, plan(asked, before, dtype, TorchPlan(), "cuda"))
