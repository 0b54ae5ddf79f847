"""Finite values that a cast makes infinite are counted, when that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline.testing._host import SimulatedHost
from rowferry.stores import ArrayStore
from rowferry.stores.testing import SimulatedDevice

Make = Callable[..., Pipeline]

# 70,000 and 65,520 are past float16; what is infinite or NaN already was not made so.
VALUES = torch.tensor([[1.0, 70_000.0], [float("inf"), float("nan")], [-65_520.0, 65_504.0], [3.0, 4.0]])


def test_values_that_a_batch_lost_are_counted_once_a_batch(pipeline: Make) -> None:
    with pipeline(VALUES.clone(), batch_sampler=[[0, 1], [2], [0, 0]], dtype=torch.float16, count_inf=True) as pipe:
        list(pipe)
        assert pipe.stats().values_made_inf == 4


def test_values_that_a_store_lost_are_counted(pipeline: Make) -> None:
    store = torch.zeros(4, 2, dtype=torch.float16)
    with pipeline(store, batch_sampler=[[0, 1], [2]], writable=True, count_inf=True) as pipe:
        for batch in pipe:
            batch.write_back(VALUES[batch.rows])
        assert pipe.stats().values_made_inf == 2
    assert torch.equal(store.isinf(), VALUES.to(torch.float16).isinf() & (torch.arange(4) < 3)[:, None])


def test_values_that_a_lookup_lost_are_counted(pipeline: Make) -> None:
    with pipeline(VALUES.clone(), batch_sampler=[[0, 0, 2]], dtype=torch.float16, writable=True, count_inf=True) as pipe:
        for batch in pipe:
            batch.lookup()
        list(pipe)
        assert pipe.stats().values_made_inf == 3


@pytest.mark.parametrize(
    ("dtype", "made"), [(torch.float16, 2), (torch.bfloat16, 0), (torch.float32, 0), (torch.float8_e5m2, 3)], ids=str
)
def test_each_dtype_has_its_own_limit(ahead: Make, dtype: torch.dtype, made: int) -> None:
    with ahead(VALUES.clone(), batch_size=4, dtype=dtype, count_inf=True) as pipe:
        list(pipe)
        assert pipe.stats().values_made_inf == made


def test_nothing_is_counted_unless_it_is_asked_for(pipeline: Make) -> None:
    with pipeline(VALUES.clone(), batch_size=2, dtype=torch.float16) as pipe:
        list(pipe)
        assert pipe.stats().values_made_inf is None


@pytest.mark.parametrize("seed", range(8))
def test_the_count_is_right_in_every_order_that_a_device_may_work_in(seed: int) -> None:
    device = SimulatedDevice(seed)
    pipe = Pipeline(
        ArrayStore(VALUES.repeat(4, 1)),
        batch_size=3,
        dtype=torch.float16,
        device=device,  # type: ignore[arg-type]  # a simulated device is taken as it is
        lookahead=2,
        staging_bytes=1 << 14,
        count_inf=True,
    )
    host = SimulatedHost(device, seed)
    pipe._new_host = lambda: host
    seen: list[Any] = []
    with pipe:
        for _batch in pipe:
            seen.append(pipe.stats().values_made_inf)
            host.pause()
        assert seen == sorted(seen)
        assert pipe.stats().values_made_inf == 8
    assert device.races == []


def test_a_table_counts_too(table: Callable[..., Any], numbered: Callable[..., Tensor]) -> None:
    del numbered
    with table().batches([[0, 1]], count_inf=True) as batches:
        for batch in batches:
            batch.weight.sum().backward()
            batch.step()
        assert batches.stats().values_made_inf == 0
