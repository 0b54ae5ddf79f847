"""Half-precision stores: rounded at write-back, to nearest, or by dice that no schedule changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, optim

from rowferry.pipeline import RowTable
from rowferry.pipeline._table_rounding import round_stochastically
from rowferry.stores import DeviceStore
from rowferry.stores.testing import bits

HALVES = (torch.bfloat16, torch.float16)


def rounded(values: Tensor, dtype: torch.dtype, seed: int = 0, batch: int = 0, rows: Tensor | None = None) -> Tensor:
    rows = torch.arange(len(values)) if rows is None else rows
    return round_stochastically(values, dtype, rows=rows, seed=seed, batch=batch)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from((*HALVES, torch.float8_e5m2)), st.integers())
def test_each_element_becomes_one_of_its_two_neighbours(values: list[float], dtype: torch.dtype, seed: int) -> None:
    exact = torch.tensor(values)
    found, near = rounded(exact[:, None], dtype, seed)[:, 0].double(), exact.to(dtype).double()
    for value, one, other in zip(exact.double(), found, near, strict=True):
        if not torch.isfinite(other) or value == other:
            assert one == other or (one.isnan() and other.isnan())
        elif one != other:  # on the other side, and nothing of the dtype between the two
            assert min(one, other) < value < max(one, other)
            assert ((one + other) / 2).float().to(dtype).double() in (one, other)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_mean_of_many_roundings_is_the_value(dtype: torch.dtype) -> None:
    values = torch.tensor([1.001, -3.3, 1e-3, 0.7]).repeat(20_000, 1)
    found = rounded(values, dtype).double()
    step = (found.max(0).values - found.min(0).values).clamp(min=1e-9)
    assert ((found.mean(0) - values[0].double()).abs() < step * 0.015).all()
    assert (found.unique(dim=0).shape[0]) > 4  # the elements of a row are thrown for one by one


def test_the_dice_depend_on_seed_batch_row_and_element_alone() -> None:
    values = torch.full((64, 4), 1.001)
    first = rounded(values, torch.bfloat16, 1, 2)
    order = torch.randperm(64)
    assert torch.equal(rounded(values, torch.bfloat16, 1, 2, rows=order), first[order])
    assert not torch.equal(rounded(values, torch.bfloat16, 2, 2), first)
    assert not torch.equal(rounded(values, torch.bfloat16, 1, 3), first)


def train(weights: Tensor, rounding: Any, epochs: int = 2, **moving: Any) -> Tensor:
    table = RowTable(DeviceStore(weights), optim.SGD, {"lr": 1e-3}, rounding=rounding, seed=5, device="cpu")
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 30, (12,), generator=generator) for _ in range(40)]
    batches = table.batches(ids, staging_bytes=1 << 18, **moving)
    for _ in range(epochs):
        for batch in batches:
            assert batch.weight.dtype == torch.float32
            (-batch.weight.sum()).backward()
            batch.step()
    table.flush()
    return weights


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_result_does_not_depend_on_lookahead(dtype: torch.dtype, rounding: str) -> None:
    ways: list[dict[str, Any]] = [{"mover": "copy", "lookahead": n, "depth": d} for n, d in ((0, 1), (1, 2), (9, 3))]
    wanted = train(torch.ones(30, 3, dtype=dtype), rounding)
    for way in ways:
        assert bits(train(torch.ones(30, 3, dtype=dtype), rounding, **way)) == bits(wanted)


def test_small_updates_of_a_bfloat16_store_survive_on_average_by_dice_and_vanish_to_nearest() -> None:
    nearest = train(torch.ones(30, 64, dtype=torch.bfloat16), "nearest")
    assert torch.equal(nearest, torch.ones_like(nearest))
    stochastic = train(torch.ones(30, 64, dtype=torch.bfloat16), "stochastic").float()
    exact = train(torch.ones(30, 64), "nearest")
    assert stochastic.mean().item() == pytest.approx(exact.mean().item(), abs=2e-3)


def test_another_rounding_or_seed_is_refused(table: Callable[..., RowTable]) -> None:
    with pytest.raises(ValueError, match="rounding is 'up'"):
        table(rounding="up")
    with pytest.raises(TypeError, match="seed"):
        table(seed=1.5)
