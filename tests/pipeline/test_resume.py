"""``state_dict`` and ``load_state_dict``: the same batches in the same order, from where the user was."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore

Make = Callable[..., Pipeline]
OTHER_WAYS = (
    {"mover": "copy", "lookahead": 0},
    {"mover": "copy", "lookahead": 1, "depth": 1},
    {"mover": "copy", "lookahead": 16, "depth": 3},
    {"mover": "local"},
)


class Stateful:
    """A sampler that keeps its place, counts what it draws, and starts anew when it is through."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        while self.at < self.count:
            self.at += 1
            self.drawn.append(self.at - 1)
            yield [self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rest(pipe: Pipeline) -> list[list[int]]:
    return [batch.index.tolist() for batch in pipe]


def take(pipe: Pipeline, count: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The first batches of an epoch, and the state after them."""
    seen = []
    for batch in pipe:
        seen.append(batch.index.tolist())
        if len(seen) == count:
            break
    return seen, pipe.state_dict()


@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
@pytest.mark.parametrize("taken", [1, 4, 9, 10])
def test_a_built_in_order_goes_on_at_the_saved_batch_under_any_setting(
    pipeline: Make, numbered: Callable[..., Tensor], taken: int, way: dict[str, Any]
) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True, seed=5) as pipe:
        first, second, third = rest(pipe), rest(pipe), rest(pipe)
        pipe.set_epoch(1)
        seen, state = take(pipe, taken)
    assert seen == second[:taken]
    with Pipeline(ArrayStore(numbered(40)), batch_size=4, shuffle=True, seed=5, device="cpu", **way) as resumed:
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert rest(resumed) == second[taken:]
        assert rest(resumed) == third
    assert first != second


def test_batches_keep_their_numbers_after_a_resume(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4) as pipe:
        _, state = take(pipe, 3)
        pipe.load_state_dict(state)
        assert [batch.number for batch in pipe] == list(range(3, 10))


def test_the_state_counts_batches_given_out_not_those_prefetched(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(numbered(40), batch_size=4) as pipe:
        for batch in pipe:
            assert pipe.state_dict()["position"] == batch.number + 1


def test_before_the_first_batch_and_after_the_end_the_state_is_that_of_an_epochs_start(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        before = pipe.state_dict()
        first = rest(pipe)
        after = pipe.state_dict()
        second = rest(pipe)
        pipe.load_state_dict(before)
        assert rest(pipe) == first
        pipe.load_state_dict(after)
        assert rest(pipe) == second


def test_the_state_is_small_and_plain(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        _, state = take(pipe, 3)
    assert json.loads(json.dumps(state)) == state
    assert len(pickle.dumps(state)) < 500


def test_a_state_of_another_seed_or_version_is_refused(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, seed=1) as pipe:
        state = pipe.state_dict()
        with pytest.raises(ValueError, match="version"):
            pipe.load_state_dict({**state, "version": 99})
    with pipeline(numbered(40), batch_size=4, seed=2) as other, pytest.raises(ValueError, match="seed=1"):
        other.load_state_dict(state)


def test_loading_a_state_ends_the_live_iterator(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4) as pipe:
        batches = iter(pipe)
        next(batches)
        pipe.load_state_dict(pipe.state_dict())
        assert [batch.number for batch in pipe] == list(range(1, 10))


def test_a_sampler_with_a_state_goes_on_from_it_and_draws_nothing_twice(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(numbered(20), batch_sampler=Stateful(20)) as pipe:
        seen, state = take(pipe, 7)
    assert seen == [[number] for number in range(7)]
    for way in OTHER_WAYS:
        sampler = Stateful(20)
        with Pipeline(ArrayStore(numbered(20)), batch_sampler=sampler, device="cpu", **way) as resumed:
            resumed.load_state_dict(state)
            assert rest(resumed) == [[number] for number in range(7, 20)]
            assert sampler.drawn == list(range(7, 20))
            assert rest(resumed) == [[number] for number in range(20)]


def test_a_sampler_without_a_state_is_drawn_again_and_that_is_said(
    ahead: Make, numbered: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def sampler() -> BatchSampler:
        return BatchSampler(RandomSampler(range(20), generator=torch.Generator().manual_seed(1)), 3, drop_last=False)

    with ahead(numbered(20), batch_sampler=sampler()) as pipe:
        whole = rest(pipe)
    with ahead(numbered(20), batch_sampler=sampler()) as pipe:
        _, state = take(pipe, 2)
    with ahead(numbered(20), batch_sampler=sampler()) as pipe, caplog.at_level(logging.INFO, "rowferry"):
        pipe.load_state_dict(state)
        assert rest(pipe) == whole[2:]
    assert "drawn again" in caplog.text


def test_a_resume_can_be_saved_and_resumed_again(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        whole = rest(pipe)
        pipe.set_epoch(0)
        seen: list[list[int]] = []
        for count in (2, 3, 1):
            part, state = take(pipe, count)
            seen += part
            pipe.load_state_dict(state)
        assert seen + rest(pipe) == whole


def test_an_array_of_rows_as_sampler_goes_on_at_the_saved_batch(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    with pipeline(numbered(40), sampler=rows, batch_size=7) as pipe:
        whole = rest(pipe)
        _, state = take(pipe, 3)
        pipe.load_state_dict(state)
        assert rest(pipe) == whole[3:]


def test_a_state_past_the_end_of_the_epoch_is_an_error(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4) as pipe:
        _, state = take(pipe, 9)
    with pipeline(numbered(8), batch_size=4) as short:
        short.load_state_dict(state)
        with pytest.raises(RuntimeError, match="batch 9"):
            next(iter(short))


def test_a_writable_pipeline_has_a_state_only_once_its_rows_are_flushed(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    values = numbered(40)
    with pipeline(values, batch_size=4, writable=True) as pipe:
        batches = iter(pipe)
        next(batches)
        assert pipe.state_dict()["position"] == 1
        next(batches).write_back(torch.zeros(4, 3))
        with pytest.raises(RuntimeError, match="flush"):
            pipe.state_dict()
        next(batches)
        with pytest.raises(RuntimeError, match="flush"):
            pipe.state_dict()
        pipe.flush()
        assert pipe.state_dict()["position"] == 3
        assert values[4:8].count_nonzero() == 0


def test_training_that_is_resumed_ends_like_training_that_was_not(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    def train(values: Tensor, stop: int | None = None, state: dict[str, Any] | None = None) -> dict[str, Any]:
        with pipeline(values, batch_size=7, shuffle=True, writable=True) as pipe:
            if state is not None:
                pipe.load_state_dict(state)
            for batch in pipe:
                batch.write_back(batch.values * 1.5 + batch.number)
                if batch.number == stop:
                    break
            pipe.flush()
            return pipe.state_dict()

    whole, halves = numbered(40), numbered(40)
    train(whole)
    train(halves, state=train(halves, stop=2))
    assert torch.equal(whole, halves)
