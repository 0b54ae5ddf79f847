"""Iterators and threads: when they begin, and that they end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore

Make = Callable[..., Pipeline]


def our_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("rowferry-"))


def require_no_threads(seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name.startswith("rowferry-"):
            thread.join(max(deadline - time.monotonic(), 0.0))
    assert our_threads() == []


def numbers(pipe: Pipeline) -> list[int]:
    return [batch.number for batch in pipe]


# ---- iterators --------------------------------------------------------------------------------------------------


def test_next_after_the_end_is_the_end_again(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(4), batch_size=4) as pipe:
        batches = iter(pipe)
        next(batches)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(batches)


def test_iter_of_an_iterator_is_itself(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        batches = iter(pipe)
        assert iter(batches) is batches
        assert [batch.number for batch in batches] == [0, 1]


def test_an_iterator_that_a_later_one_ended_says_so(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    """zip(pipe, pipe) would else be an empty loop without a word."""
    with pipeline(numbered(8), batch_size=4) as pipe:
        with pytest.raises(RuntimeError, match="iter"):
            list(zip(pipe, pipe, strict=False))
        assert numbers(pipe) == [0, 1]


def test_after_a_break_the_next_epoch_starts_with_its_first_batch(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4) as pipe:
        for batch in pipe:
            if batch.number == 3:
                break
        assert numbers(pipe) == list(range(10))


def test_a_break_counts_as_an_epoch_for_shuffle(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        epochs = [[batch.index.tolist() for batch in pipe] for _ in range(2)]
        pipe.set_epoch(0)
        for _ in pipe:
            break
        assert [batch.index.tolist() for batch in pipe] == epochs[1]


def test_an_iterator_begun_and_never_used_ends_with_the_next(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4) as pipe:
        for _ in range(5):
            iter(pipe)
        assert numbers(pipe) == list(range(10))


def test_two_pipelines_over_one_store_are_independent(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    store = ArrayStore(numbered(40))
    with pipeline(store, batch_size=4) as one, pipeline(store, batch_size=4) as two:
        assert [(a.number, b.number) for a, b in zip(one, two, strict=True)] == [(k, k) for k in range(10)]


# ---- threads ----------------------------------------------------------------------------------------------------


def test_threads_start_with_iter_and_end_with_the_epoch(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(numbered(40), batch_size=4, writable=True) as pipe:
        assert our_threads() == []
        batches = iter(pipe)
        assert our_threads() == ["rowferry-producer", "rowferry-writer"]
        assert len(list(batches)) == 10
        assert our_threads() == []


def test_a_reading_pipeline_has_no_writer(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(numbered(40), batch_size=4) as pipe:
        batches = iter(pipe)
        next(batches)
        assert our_threads() == ["rowferry-producer"]


@pytest.mark.parametrize("mover", ["local", "copy"])
def test_without_lookahead_and_for_local_rows_no_thread_is_started(numbered: Callable[..., Tensor], mover: Any) -> None:
    lookahead = 0 if mover == "copy" else 4
    with Pipeline(
        numbered(40),
        batch_size=4,
        device="cpu",
        mover=mover,
        lookahead=lookahead,
        writable=True,
    ) as pipe:
        for batch in pipe:
            batch.write_back()
            assert our_threads() == []


@pytest.mark.parametrize("keywords", [{"mover": "copy", "lookahead": 0}, {"mover": "local"}], ids=str)
def test_there_the_sampler_is_called_inside_next_in_the_callers_thread(
    numbered: Callable[..., Tensor], keywords: dict[str, Any]
) -> None:
    step, calls = [0], []

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            for _ in range(5):
                calls.append((threading.current_thread(), step[0]))
                yield [step[0]]

    with Pipeline(numbered(8), batch_sampler=Sampler(), device="cpu", **keywords) as pipe:
        for number, batch in enumerate(pipe):
            assert batch.index.tolist() == [number]  # a sampler that depends on the step
            step[0] += 1
    assert calls == [(threading.current_thread(), number) for number in range(5)]


def test_iter_of_the_sampler_and_its_first_item_come_in_the_callers_thread(
    ahead: Make, numbered: Callable[..., Tensor]
) -> None:
    seen: list[threading.Thread] = []

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            seen.append(threading.current_thread())
            yield [0]
            seen.append(threading.current_thread())
            yield [1]

    with ahead(numbered(8), batch_sampler=Sampler()) as pipe:
        list(pipe)
    assert seen[0] is threading.current_thread()
    assert seen[1].name == "rowferry-producer"


def test_the_producer_runs_ahead_no_further_than_its_slots(numbered: Callable[..., Tensor]) -> None:
    drawn: list[int] = []

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            for number in range(1000):
                drawn.append(number)
                yield [number % 8]

    lookahead, depth = 4, 2
    with Pipeline(numbered(8), batch_sampler=Sampler(), device="cpu", mover="copy", lookahead=lookahead, depth=depth) as pipe:
        for batch in pipe:
            assert drawn[-1] <= batch.number + (depth + 2) * lookahead
            if batch.number == 300:
                break


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_dropped_iterator_ends_its_threads(ahead: Make, numbered: Callable[..., Tensor], taken: int) -> None:
    with ahead(numbered(400), batch_size=4) as pipe:
        batches = iter(pipe)
        for _ in range(taken):
            next(batches)
        assert our_threads()
        del batches
        gc.collect()
        require_no_threads()
        assert numbers(pipe) == list(range(100))


def test_a_dropped_pipeline_ends_its_threads_and_is_freed(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    pipe = ahead(numbered(400), batch_size=4)
    batches = iter(pipe)
    next(batches)
    reference = weakref.ref(pipe)
    del pipe, batches
    gc.collect()
    require_no_threads()
    assert reference() is None


def test_the_many_threads_that_gather_end_too(numbered: Callable[..., Tensor]) -> None:
    with Pipeline(numbered(4000), batch_size=1000, device="cpu", mover="copy", threads=4) as pipe:
        assert torch.cat([batch.data for batch in pipe]).equal(numbered(4000))
        require_no_threads(0.0)


def test_an_epoch_can_be_taken_in_another_thread_than_the_one_before(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(numbered(40), batch_size=4) as pipe:
        found: list[list[int]] = [numbers(pipe)]
        thread = threading.Thread(target=lambda: found.append(numbers(pipe)))
        thread.start()
        thread.join()
        assert found == [list(range(10))] * 2
