"""Small batches of a window that are gathered together: as if each had been gathered alone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline.testing._host import SimulatedHost
from rowferry.stores import ArrayStore
from rowferry.stores.testing import SimulatedDevice

ASKED = [[0], [1, 2], [[3, 4], [5, 6]], [], [7, 7, 0], [8], [9], [1]]


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def batches(device: SimulatedDevice, numbered: Callable[..., Tensor]) -> Iterator[Any]:
    """An epoch over numbered rows in windows of up to four batches: 1, 2, 4 and what is left."""
    pipe = Pipeline(ArrayStore(numbered(10)), batch_sampler=ASKED, device=device, lookahead=4, mover="copy", staging_bytes=4096)  # type: ignore[arg-type]
    pipe._new_host = lambda: SimulatedHost(device, 0)
    with pipe:
        yield iter(pipe)


def test_they_are_right_and_came_by_one_launch_a_window(
    device: SimulatedDevice, batches: Any, numbered: Callable[..., Tensor]
) -> None:
    found = list(batches)
    indices = [batch.index for batch in found]
    device.drain()
    for batch, looked_at, asked in zip(found, indices, ASKED, strict=True):
        index = torch.tensor(asked, dtype=torch.int64)
        assert torch.equal(looked_at, index)
        assert batch.index is looked_at
        assert torch.equal(batch.data, numbered(10)[index])
    assert device.ran["serve"] == 4


def test_a_change_in_place_spoils_nothing_that_a_graph_saved_of_another(device: SimulatedDevice, batches: Any) -> None:
    found = list(batches)
    for batch in found[1:]:
        assert batch.index.dtype == torch.int64  # the first look at it copies it
    device.drain()
    weight = torch.ones(3, requires_grad=True)
    loss = (found[1].data * weight).sum()
    for batch in found[2:]:
        batch.data.sub_(1.0)
        batch.index.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [300.0, 302.0, 304.0]
    assert found[1].index.tolist() == [1, 2]


@pytest.mark.parametrize("asked", [[[0, 3]], [[0, 3], [5]], [[[0], [3]], [5]]])
def test_a_batch_of_no_grad_may_be_changed_by_what_has_a_gradient(asked: list[Any]) -> None:
    device = SimulatedDevice()
    pipe = Pipeline(ArrayStore(torch.arange(8.0)), batch_sampler=asked, device=device, mover="copy", lookahead=4)  # type: ignore[arg-type]
    pipe._new_host = lambda: SimulatedHost(device, 0)
    with pipe, torch.no_grad():
        batches = list(pipe)
    device.drain()
    weight = torch.tensor(2.0, requires_grad=True)
    batches[0].data.mul_(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 3.0


@pytest.mark.parametrize("writable", [False, True])
def test_a_kept_batch_keeps_no_slot_and_no_table(writable: bool) -> None:
    store = ArrayStore(torch.arange(8.0))
    pipe = Pipeline(store, batch_sampler=[[0, 3], [5]], device="cpu", mover="copy", writable=writable)
    assert pipe._parts is not None
    kept: list[weakref.ref[Any]] = [weakref.ref(arena) for arena in pipe._parts.arenas._arenas]
    if not writable:  # one to write knows its source, by which it looks values up
        kept.append(weakref.ref(store))
    batches = iter(pipe)
    batch = next(batches)
    pipe.close()
    del pipe, store, batches
    gc.collect()
    assert [found for one in kept if (found := one()) is not None] == []
    assert batch.index.tolist() == [0, 3]


def test_a_batch_may_be_pickled_whether_its_index_was_looked_at_or_not() -> None:
    with Pipeline(ArrayStore(torch.arange(8.0)), batch_sampler=[[0, 3], [5]]) as pipe:
        batches = list(pipe)
    assert batches[0].index.tolist() == [0, 3]
    for batch, index in zip(batches, ([0, 3], [5]), strict=True):
        for again in (pickle.loads(pickle.dumps(batch)), copy.copy(batch)):
            assert (again.number, again.index.tolist(), again.data.tolist()) == (batch.number, index, index)
            assert again.item == batch.item


def test_a_batchs_index_may_be_replaced_like_its_other_parts() -> None:
    with Pipeline(ArrayStore(torch.arange(8.0)), batch_sampler=[[0, 3]], device="cpu", mover="copy") as pipe:
        batch = next(iter(pipe))
    batch.index, batch.item = torch.tensor([7]), "mine"
    assert (batch.index.tolist(), batch.item) == ([7], "mine")


def test_on_another_stream_they_are_gathered_anew(
    device: SimulatedDevice, batches: Any, numbered: Callable[..., Tensor]
) -> None:
    found = [next(batches) for _ in range(4)]  # the fourth is the first of its window
    with device.use(device.stream("another")):
        found += list(batches)
    device.drain()
    assert device.ran["serve"] == 5
    for batch, asked in zip(found, ASKED, strict=True):
        assert torch.equal(batch.data, numbered(10)[torch.tensor(asked, dtype=torch.int64)])
    assert not device.races


def test_batches_of_many_bytes_have_memory_of_their_own(
    device: SimulatedDevice, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowferry.pipeline._serving.GROUP_BYTES", 24)  # two rows
    found = list(batches)
    device.drain()
    owners = [batch.data.untyped_storage().data_ptr() for batch in found if batch.data.numel()]
    assert len(set(owners)) == 6  # rows 7, 7, 0 and row 8 make more than two rows; rows 9 and 1 do not
