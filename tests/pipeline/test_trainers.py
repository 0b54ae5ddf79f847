"""What trainers ask of the loader that they are given; ``docs/recipes.md`` runs the trainers themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rowferry as rf
from rowferry.pipeline import Pipeline

Make = Callable[..., Pipeline]


def rest(pipe: Pipeline) -> list[list[int]]:
    return [batch.index.tolist() for batch in pipe]


def test_a_pipeline_and_a_prefetcher_tell_their_torch_device(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        assert pipe.device == torch.device("cpu")
    assert rf.prefetch([], device="cpu").device == torch.device("cpu")


def test_no_private_name_is_taken_for_one_that_fastai_asks_its_loaders_for(numbered: Callable[..., Tensor]) -> None:
    loaders: tuple[Any, ...] = (Pipeline(numbered(8), batch_size=4, device="cpu"), rf.prefetch([], device="cpu"))
    for loader in loaders:
        assert not hasattr(loader, "_device")  # DataLoaders.device falls back on it, and wants a torch.device


def test_asking_whether_it_can_be_iterated_over_skips_no_epoch(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        first, second = rest(pipe), rest(pipe)
        pipe.set_epoch(0)
        iter(pipe)
        iter(pipe)
        assert rest(pipe) == first
        iter(pipe)
        assert rest(pipe) == second


def test_asking_does_not_lose_a_place_that_was_loaded(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        first, second = rest(pipe), rest(pipe)
        pipe.set_epoch(0)
        running = iter(pipe)
        seen = [next(running).index.tolist() for _ in range(3)]
        state = pipe.state_dict()
        pipe.load_state_dict(state)
        iter(pipe)
        assert pipe.state_dict() == state
        assert seen + rest(pipe) == first
        assert rest(pipe) == second


def test_an_epoch_left_after_a_batch_is_over(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        _, second = rest(pipe), rest(pipe)
        pipe.set_epoch(0)
        next(iter(pipe))
        assert rest(pipe) == second


def test_a_batch_is_cut_by_slices_as_learners_do(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline((numbered(8), numbered(8)), batch_size=4) as pipe:
        for batch in pipe:
            inputs, targets = batch[:1], batch[1:]
            assert (len(inputs), len(targets), len(batch)) == (1, 1, 2)
            assert torch.equal(inputs[0], targets[0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_place_can_be_kept_in_a_file_that_torch_loads_safely(
    pipeline: Make, numbered: Callable[..., Tensor], tmp_path: Any, shuffle: bool
) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=shuffle) as pipe:
        running = iter(pipe)
        next(running)
        torch.save(pipe.state_dict(), tmp_path / "state.pt")
        left = [batch.index.tolist() for batch in running]
        pipe.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert rest(pipe) == left
