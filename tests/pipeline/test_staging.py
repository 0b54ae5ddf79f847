"""Pinned buffers: lent to one borrower at a time, at rest after a while, and given up at the end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline._staging import PinnedPool
from rowferry.stores._devices import CpuDevice

Make = Callable[..., Pipeline]


def test_a_buffer_is_lent_to_one_thread_at_a_time() -> None:
    pool, start = PinnedPool(CpuDevice()), threading.Barrier(4)

    def borrow(number: int) -> bool:
        start.wait(10)
        alone = True
        for _ in range(500):
            buffer = pool.take(4096)
            buffer[0] = number
            event = pool._device.record("cpu", timing=True)
            alone = alone and int(buffer[0]) == number
            pool.give(buffer, event if number % 2 else None)
        return alone

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(borrow, range(4))) == [True] * 4
    assert pool.nbytes <= 4 * 4096


@pytest.mark.parametrize("writable", [False, True])
def test_a_small_table_takes_little_memory_and_windows_still_grow(numbered: Callable[..., Tensor], writable: bool) -> None:
    batches = [np.arange(7) + start % 90 for start in range(1000)]
    with Pipeline(numbered(100), batch_sampler=batches, device="cpu", mover="copy", writable=writable) as pipe:
        for batch in pipe:
            assert torch.equal(batch.values if writable else batch.data, numbered(100)[batch.index])
        assert pipe.stats().bytes_staging <= 2 * 2 * 3 * 1024
        assert pipe.stats().windows <= 11  # of 1, 2, 4, ... batches


def test_tables_without_rows_or_bytes_have_slots_too(ahead: Make) -> None:
    for shape in ((0, 3), (5, 0)):
        with Pipeline(torch.zeros(shape), batch_size=2, device="cpu", mover="copy") as pipe:
            assert sum(len(batch.data) for batch in pipe) == shape[0]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """All pinned memory that the pipeline of a test takes, as long as it lives."""
    owners: list[weakref.ref[Any]] = []

    def take(self: CpuDevice, nbytes: int) -> Tensor:
        owner = np.zeros(nbytes, np.uint8)
        owners.append(weakref.ref(owner))
        return torch.from_numpy(owner)

    monkeypatch.setattr(CpuDevice, "pinned", take)
    return owners


@pytest.mark.parametrize("writable", [False, True])
def test_batches_of_changing_size_come_to_rest_and_closing_gives_all_back(
    ahead: Make, numbered: Callable[..., Tensor], pinned: list[weakref.ref[Any]], writable: bool
) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 3000, rng.integers(1000, 1200)) for _ in range(300)]
    with ahead(numbered(3000), batch_sampler=batches, writable=writable) as pipe:
        for batch in pipe:
            if writable:
                batch.write_back(batch.values + 1)
            if batch.number == 100:
                taken = len(pinned)
        assert 0 < len(pinned) <= taken + 2
    del pipe
    assert [owner for owner in pinned if owner() is not None] == []
