"""Starting in the middle of an epoch: by the sampler's own state, else by drawing again."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rowferry.pipeline._sampling import StatefulItem, make_source


def rows_in(epoch: Iterator[StatefulItem]) -> list[list[int]]:
    return [np.asarray(drawn.item).tolist() for drawn in epoch]


class Keeping:
    """A sampler that keeps its place in itself, and hands out its live state."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.state = {"next": 0}
        self.iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        while self.state["next"] < self.n:
            self.state["next"] += 1
            yield self.state["next"] - 1
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class KeepingIterator:
    """An iterator with a state of its own, as torchdata's samplers make them."""

    def __init__(self, n: int) -> None:
        self.n, self.next = n, 0

    def __iter__(self) -> KeepingIterator:
        return self

    def __next__(self) -> list[int]:
        if self.next == self.n:
            raise StopIteration
        self.next += 1
        return [self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class KeptByIterator:
    def __iter__(self) -> KeepingIterator:
        return KeepingIterator(6)


@pytest.mark.parametrize("skip", [0, 1, 3, 6])
def test_a_sampler_with_a_state_resumes_from_it_and_not_by_drawing_again(skip: int) -> None:
    first = make_source(12, sampler=Keeping(12), batch_size=2)
    drawn = list(first.epoch(0))
    state = pickle.loads(pickle.dumps(drawn[skip - 1].state)) if skip else None
    sampler = Keeping(12)
    resumed = make_source(12, sampler=sampler, batch_size=2).epoch(0, skip, state)
    assert sampler.iterations == 0
    assert rows_in(resumed) == rows_in(iter(drawn[skip:]))


def test_the_state_with_an_item_is_that_just_after_it_and_stays_so() -> None:
    drawn = list(make_source(6, sampler=Keeping(6), batch_size=2).epoch(0))
    assert [d.state for d in drawn] == [{"next": 2}, {"next": 4}, {"next": 6}]


def test_a_state_kept_by_the_iterator_is_used_too() -> None:
    drawn = list(make_source(6, batch_sampler=KeptByIterator()).epoch(0))
    assert drawn[2].state == {"next": 3}
    assert rows_in(make_source(6, batch_sampler=KeptByIterator()).epoch(0, 3, drawn[2].state)) == [[3], [4], [5]]


def test_a_sampler_without_a_state_is_drawn_again_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    batches = [[i] for i in range(5)]
    with caplog.at_level(logging.INFO, logger="rowferry"):
        source = make_source(9, batch_sampler=batches)
        assert rows_in(source.epoch(0, 0)) == batches
        assert not caplog.records
        assert rows_in(source.epoch(0, 3)) == batches[3:]
    assert "resuming at batch 3" in caplog.text
    assert "list" in caplog.text
    assert rows_in(source.epoch(0, 5)) == []
    assert rows_in(make_source(9, sampler=range(10), batch_size=3).epoch(0, 2)) == [[6, 7, 8], [9]]


def test_resuming_past_the_end_of_an_epoch_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended after 2 batches"):
        make_source(9, batch_sampler=[[0], [1]]).epoch(0, skip=3)
    for source in (make_source(9, batch_size=5), make_source(9, sampler=np.arange(9), batch_size=5)):
        with pytest.raises(RuntimeError, match="an epoch has 2 batches"):
            source.epoch(0, skip=3)


def test_a_state_for_a_sampler_that_keeps_none_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="load_state_dict"):
        make_source(9, batch_sampler=[[0], [1]]).epoch(0, 1, {"next": 1})


def test_batches_are_numbered_from_the_resumed_one_in_errors() -> None:
    class Wrong(Keeping):
        def __iter__(self) -> Iterator[Any]:
            yield from ("no", "row")

    with pytest.raises(TypeError, match="batch 7"):
        next(make_source(9, sampler=Wrong(9), batch_size=2).epoch(0, 7, {"next": 2}))
