"""The largest batch: found by trying, the same from any guess, and guessed so well that few are tried."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from _mixed.precision import NAMES, Name
from _mixed.search import FIRST, MOST, STEPS, Bracket, guessed, largest, place_of, searched, size_at, trial
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rowferry as rf

CPU = torch.device("cpu")
SCALE = [size_at(place) for place in range(place_of(MOST) + 1)]
LIMITS = st.one_of(st.integers(0, 200), st.integers(0, 20_000), st.integers(0, 2 * MOST))


def test_sizes_are_a_32nd_apart_and_each_has_its_place() -> None:
    assert SCALE[:66] == [*range(65), 66]
    assert SCALE[-1] == MOST
    assert all(low < high <= max(low + 1, low + low / STEPS) for low, high in pairwise(SCALE))
    assert [place_of(size) for size in SCALE] == list(range(len(SCALE)))


@given(LIMITS)
def test_the_place_of_a_size_between_two_is_that_of_the_smaller(size: int) -> None:
    assert size_at(place_of(size)) <= size < size_at(place_of(size) + 1)


def search(limit: int, guess: int) -> tuple[Bracket, list[int]]:
    """What is found, and the sizes that were tried for it."""
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    return largest(fits, guess), asked


@given(limit=LIMITS, guess=LIMITS)
@settings(max_examples=500, deadline=None)
def test_any_guess_leads_to_the_largest_size_that_fits(limit: int, guess: int) -> None:
    found, asked = search(limit, guess)
    assert found.fits == max(size for size in SCALE if size <= limit)
    assert found.too_large == next((size for size in SCALE if size > limit), None)
    assert len(asked) == len(set(asked))
    assert set(asked) >= {found.fits, found.too_large} - {0, None}, "what is reported was tried"
    assert 0 not in asked


@given(limit=st.integers(1, MOST), guess=LIMITS)
@settings(max_examples=500, deadline=None)
def test_on_the_way_up_nothing_is_tried_that_is_more_than_twice_what_fits(limit: int, guess: int) -> None:
    _found, asked = search(limit, guess)
    assert max(asked) <= max(2 * limit, guess)


@pytest.mark.parametrize(("off", "most"), [(0, 2), (0.02, 4), (0.05, 6), (0.1, 8)])
def test_the_better_the_guess_the_fewer_are_tried(off: float, most: int) -> None:
    for limit in range(100, 3_000, 7):
        for sign in (-1, 1):
            assert len(search(limit, round(limit * (1 + sign * off)))[1]) <= most


@given(of_the_model=st.integers(0, 10**9), a_row=st.integers(1, 10**8), limit=st.integers(10**9, 10**11))
def test_memory_that_grows_by_the_row_is_drawn_out_to_the_limit(of_the_model: int, a_row: int, limit: int) -> None:
    tried: list[int] = []

    def peak(batch: int) -> int | None:
        tried.append(batch)
        taken = of_the_model + a_row * batch
        return taken if taken <= limit else None

    guess = guessed(peak, limit)
    true = (limit - of_the_model) // a_row
    if true >= 2 * FIRST:
        assert guess == pytest.approx(min(true, MOST), abs=1)
    assert len(tried) <= 2
    assert tried[1:] in ([], [2 * FIRST]) or of_the_model + a_row * tried[1] <= limit / 2 + a_row


@given(peaks=st.lists(st.one_of(st.none(), st.integers(0, 10**12)), min_size=2, max_size=2), limit=st.integers(1, 10**12))
def test_a_guess_is_a_size_whatever_the_memory_seems_to_be(peaks: list[int | None], limit: int) -> None:
    left = list(peaks)
    assert largest(lambda batch: batch <= 7, guessed(lambda batch: left.pop(0), limit)).fits == 7


# ---- trials, with a pretence of a GPU's memory -----------------------------------------------------------------------


class Pretence:
    """Memory of which a model takes ``OWN`` and a row ``ROW`` bytes; the task asks for its room."""

    OWN, ROW = 3_000, 100

    def __init__(self, limit: int) -> None:
        self.limit, self.most, self.inside = limit, 0, False
        self.models: list[weakref.ref[nn.Module]] = []

    @contextmanager
    def limited(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def clear(self) -> None:
        assert [each for each in self.models if each() is not None] == [], "what a trial held is gone before the next"
        self.most = 0

    def take(self, rows: int) -> None:
        assert self.inside
        taken = self.OWN + self.ROW * rows + rows % 3 * 40  # not quite a line
        if taken > self.limit:
            raise torch.OutOfMemoryError("as CUDA does")
        self.most = max(self.most, taken)

    def peak(self) -> int:
        return self.most


class Small:
    """A task of two weights, which asks a pretence for its room."""

    name, batch, clip = "small", 4, None

    def __init__(self, memory: Pretence) -> None:
        self.memory = memory

    def model(self) -> nn.Module:
        model = nn.Linear(2, 2)
        model.__dict__["circle"] = [model]  # as some of torch's objects are: only the collector takes it away
        self.memory.models.append(weakref.ref(model))
        return model

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters)

    def pipeline(self, part: str, dtype: torch.dtype, device: torch.device) -> rf.Pipeline:
        raise AssertionError("a search reads no data")

    def random(self, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {
            "x": torch.rand(batch, 2, dtype=dtype, device=device),
            "y": torch.zeros(batch, dtype=torch.int64, device=device),
        }

    def forward(self, model: nn.Module, batch: Any, *, train: bool) -> tuple[Tensor, Tensor]:
        scores = model(batch["x"])
        self.memory.take(len(batch["y"]))
        return scores, batch["y"]


@pytest.mark.parametrize("precision", NAMES)
def test_a_search_takes_few_trials_and_leaves_the_collector_as_it_was(precision: Name) -> None:
    memory = Pretence(14_000)
    found = searched(Small(memory), precision, CPU, memory)
    assert (found.largest_batch, found.too_large) == (108, 110)
    assert found.trials <= 6
    assert found.search_seconds > 0
    assert len(memory.models) == found.trials
    assert gc.get_freeze_count() == 0
    assert not memory.inside


@pytest.mark.parametrize(
    ("limit", "fits", "too_large", "most"),
    [(8_000, 49, 50, 6), (9_450, 64, 66, 3)],  # the second that is measured does not fit; it is what is found
)
def test_what_was_measured_is_not_tried_again_and_helps_though_it_does_not_fit(
    limit: int, fits: int, too_large: int, most: int
) -> None:
    memory = Pretence(limit)
    found = searched(Small(memory), "fp32", CPU, memory)
    assert (found.largest_batch, found.too_large) == (fits, too_large)
    assert len(memory.models) == found.trials <= most


def test_of_a_model_that_has_no_room_nothing_fits() -> None:
    memory = Pretence(1_000)
    found = searched(Small(memory), "fp32", CPU, memory)
    assert (found.largest_batch, found.too_large) == (0, 1)


@pytest.mark.parametrize("said", ["GET was unable to find an engine to execute this computation", "a mistake"])
def test_an_error_means_that_there_is_no_room_only_where_it_says_so(said: str) -> None:
    class Failing(Small):
        def forward(self, model: nn.Module, batch: Any, *, train: bool) -> tuple[Tensor, Tensor]:
            raise RuntimeError(said)

    memory = Pretence(10_000)
    if "engine" in said:  # what torch says of a convolution that gets no memory to work in
        assert trial(Failing(memory), "fp32", CPU, memory, 4) is None
        return
    memory.models = Forgetful()  # the error that rises holds its model
    with pytest.raises(RuntimeError, match=said):
        trial(Failing(memory), "fp32", CPU, memory, 4)


class Forgetful(list[Any]):
    def append(self, item: object) -> None:
        del item


@pytest.mark.gpu
def test_on_a_gpu_the_limit_holds_inside_and_ends_with_the_search() -> None:
    from _mixed.search import CudaMemory

    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaMemory(device, 0.5)
    with memory.limited(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(600_000_000, dtype=torch.uint8, device=device)
    memory.clear()
    kept = torch.empty(600_000_000, dtype=torch.uint8, device=device)
    assert memory.peak() >= kept.nbytes
