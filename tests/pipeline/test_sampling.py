"""Index batches: what the arguments mean, and what is drawn from orders and samplers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from rowferry.pipeline._sampling import BatchSource, Positions, make_source, rows_of
from rowferry.pipeline._shuffle import Permutation

FORTY = TensorDataset(torch.arange(40))


def items(source: BatchSource, epoch: int = 0, skip: int = 0, state: Any = None) -> list[list[int]]:
    """The rows of an epoch, a list a batch."""
    return [np.asarray(rows_of(drawn.item, None, 0)).tolist() for drawn in source.epoch(epoch, skip, state)]


class Endless:
    """A sampler without a length whose iterations are counted."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.given += 1
            yield self.given


# ---- built-in orders --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 50), batch_size=st.integers(1, 60), drop_last=st.booleans())
def test_rows_in_order_are_grouped_as_torch_groups_them(n: int, batch_size: int, drop_last: bool) -> None:
    theirs = BatchSampler(SequentialSampler(range(n)), batch_size, drop_last)
    built_in = make_source(n, batch_size=batch_size, drop_last=drop_last)
    grouped = make_source(n, sampler=range(n), batch_size=batch_size, drop_last=drop_last)
    from_array = make_source(n, sampler=torch.arange(n), batch_size=batch_size, drop_last=drop_last)
    for source in (built_in, grouped, from_array):
        assert items(source) == list(theirs)
        assert len(source) == len(theirs)
        assert items(source, skip=len(theirs) // 2) == list(theirs)[len(theirs) // 2 :]


def test_a_shuffled_epoch_has_every_row_once_and_no_two_epochs_are_alike() -> None:
    source = make_source(1000, batch_size=64, shuffle=True, seed=5)
    first, second = (np.concatenate(items(source, epoch)) for epoch in (0, 1))
    assert np.array_equal(np.sort(first), np.arange(1000))
    assert np.array_equal(np.sort(second), np.arange(1000))
    assert not np.array_equal(first, second)
    assert np.array_equal(np.concatenate(items(source, 0)), first)
    assert np.array_equal(first, Permutation(1000, 5, 0)(np.arange(1000)))
    assert items(make_source(1000, batch_size=64, shuffle=True, seed=6)) != items(source, 0)


def test_built_in_items_are_descriptions_that_are_evaluated_later() -> None:
    drawn = [d.item for d in make_source(10, batch_size=4).epoch(0)]
    assert drawn == [Positions(0, 4, None), Positions(4, 8, None), Positions(8, 10, None)]
    assert [len(item) for item in drawn] == [4, 4, 2]
    assert drawn[2].rows().tolist() == [8, 9]
    assert drawn[2].rows().dtype == np.int64


def test_an_epoch_of_a_trillion_shuffled_rows_starts_anywhere_at_once() -> None:
    source = make_source(10**12, batch_size=1000, shuffle=True)
    last = next(source.epoch(0, skip=10**9 - 1)).item
    assert (last.start, last.stop) == (10**12 - 1000, 10**12)
    assert len(source) == 10**9


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "batch_size=, sampler= or batch_sampler="),
        ({"shuffle": True}, "batch_size="),
        ({"batch_sampler": [[0]], "batch_size": 1}, "excludes batch_size"),
        ({"batch_sampler": [[0]], "shuffle": True}, "excludes shuffle"),
        ({"batch_sampler": [[0]], "sampler": [0], "drop_last": True}, "excludes sampler, drop_last"),
        ({"sampler": [0], "batch_size": 1, "shuffle": True}, "excludes shuffle"),
        ({"sampler": [[0]], "drop_last": True}, "drop_last needs batch_size"),
        *(({"batch_size": size}, "not a positive int") for size in (0, -1, True, 2.0, "4", np.True_, [4])),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_source(10, **arguments)


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="batch_sampler is a int"):
        make_source(10, batch_sampler=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float32"):
        make_source(10, sampler=torch.ones(3), batch_size=1)
    with pytest.raises(TypeError, match=r"\(2, 2\)"):
        make_source(10, sampler=np.zeros((2, 2), int), batch_size=1)
    with pytest.raises(TypeError):
        make_source(10, batch_size=2, seed=1.5)  # type: ignore[arg-type]
    assert len(make_source(10, batch_size=np.int32(5))) == 2  # type: ignore[arg-type]


# ---- the user's samplers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_torch_sampler_is_grouped_as_by_a_batch_sampler_of_torch(drop_last: bool) -> None:
    def sampler() -> RandomSampler:
        return RandomSampler(range(23), generator=torch.Generator().manual_seed(1))

    source = make_source(23, sampler=sampler(), batch_size=5, drop_last=drop_last)
    theirs = BatchSampler(sampler(), 5, drop_last)
    assert [items(source, epoch) for epoch in range(3)] == [list(theirs) for _ in range(3)]
    assert len(source) == len(theirs)
    assert all(d.item.dtype == np.int64 for d in source.epoch(3))


def test_rows_may_be_ints_of_numpy_or_tensors_without_dimensions() -> None:
    source = make_source(9, sampler=[1, np.int32(2), torch.tensor(3), np.uint8(4)], batch_size=3)
    assert items(source) == [[1, 2, 3], [4]]


@pytest.mark.parametrize("bad", [1.5, "x", [1, 2], torch.tensor(0.5), None, 2**70])
def test_what_is_no_row_number_is_refused_by_batch(bad: Any) -> None:
    epoch = make_source(9, sampler=[0, 1, 2, bad], batch_size=2).epoch(0)
    assert next(epoch).item.tolist() == [0, 1]
    with pytest.raises(TypeError, match=r"batch 1: .* batch_sampler="):
        next(epoch)


def test_a_sampler_without_batch_size_makes_whole_batches_as_in_a_dataloader() -> None:
    source = make_source(9, sampler=BatchSampler(SequentialSampler(range(7)), 3, False))
    assert items(source) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(source) == 3


def test_items_of_a_batch_sampler_come_as_they_are() -> None:
    batches = [{"seed": 1}, torch.arange(3), (np.arange(2), "label")]
    drawn = [d.item for d in make_source(9, batch_sampler=batches).epoch(0)]
    assert all(a is b for a, b in zip(drawn, batches, strict=True))


def test_a_sampler_is_asked_for_no_row_more_than_its_batch_needs() -> None:
    rows = Endless()
    epoch = make_source(9, sampler=rows, batch_size=4).epoch(0)
    assert rows.given == 0
    for batches in (1, 2, 3):
        next(epoch)
        assert rows.given == 4 * batches


def test_a_sampler_without_a_length_gives_a_source_without_one() -> None:
    for source in (make_source(9, sampler=Endless(), batch_size=2), make_source(9, batch_sampler=iter([[0]]))):
        with pytest.raises(TypeError, match="has no length"):
            len(source)


def test_an_array_of_rows_is_served_in_slices_that_are_copies() -> None:
    rows = np.array([5, 3, 5, 0, 1], np.int32)
    drawn = [d.item for d in make_source(9, sampler=rows, batch_size=2).epoch(0)]
    rows[:] = 7
    assert [item.tolist() for item in drawn] == [[5, 3], [5, 0], [1]]


def test_the_sampler_and_the_sampler_inside_a_batch_sampler_are_told_the_epoch() -> None:
    inner: DistributedSampler[Any] = DistributedSampler(FORTY, num_replicas=2, rank=1, shuffle=True)
    wrapped = make_source(40, batch_sampler=BatchSampler(inner, 7, False))
    bare = make_source(40, sampler=DistributedSampler(FORTY, num_replicas=2, rank=1, shuffle=True), batch_size=7)
    for epoch in (3, 0, 3):
        assert items(wrapped, epoch) == items(bare, epoch)
        assert inner.epoch == epoch
    assert items(bare, 0) != items(bare, 1)


def test_a_one_shot_iterator_serves_one_epoch_and_then_says_what_to_pass() -> None:
    for source in (
        make_source(9, batch_sampler=([i] for i in range(3))),
        make_source(9, sampler=iter([0, 1, 2]), batch_size=1),
    ):
        assert items(source, 4) == [[0], [1], [2]]
        with pytest.raises(RuntimeError, match=r"can be drawn from once.*a list, a torch sampler"):
            source.epoch(5)


def test_an_iterator_that_takes_set_epoch_may_be_drawn_from_again() -> None:
    class Rewinding:
        left = 0

        def set_epoch(self, epoch: int) -> None:
            self.left = 3 - epoch

        def __iter__(self) -> Iterator[list[int]]:
            return self

        def __next__(self) -> list[int]:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return [2 - self.left]

    source = make_source(9, batch_sampler=Rewinding())
    assert items(source, 0) == [[0], [1], [2]]
    assert items(source, 1) == [[1], [2]]


def test_what_a_sampler_raises_is_passed_on() -> None:
    def broken() -> Iterator[list[int]]:
        yield [0]
        raise OSError("disk")

    epoch = make_source(9, batch_sampler=broken()).epoch(0)
    next(epoch)
    with pytest.raises(OSError, match="disk"):
        next(epoch)
