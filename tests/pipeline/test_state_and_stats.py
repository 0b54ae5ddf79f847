"""What a pipeline tells about itself: counters, one sentence, and what it holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import SlowStore

Make = Callable[..., Pipeline]


def test_before_the_first_batch_the_counters_are_zero_and_the_sentence_says_so(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        stats = pipe.stats()
    assert (stats.batches, stats.rows, stats.bytes, stats.windows, stats.rows_fetched, stats.drains) == (0, 0, 0, 0, 0, 0)
    assert stats.verdict == "no batch was given out yet"


def test_rows_and_bytes_are_counted_as_asked_for_and_as_fetched(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    source = {"x": numbered(8), "y": torch.arange(8)}
    with windowed(source, batch_sampler=[[0, 0, 0], [1, 2]]) as pipe:
        list(pipe)
        stats = pipe.stats()
    assert (stats.batches, stats.rows, stats.bytes) == (2, 5, 5 * (12 + 8))
    assert stats.rows_distinct == 3
    assert (stats.rows_fetched, stats.bytes_fetched) == (2 * 3, 3 * (12 + 8))
    assert (stats.rows_drained, stats.drains) == (0, 0)


def test_local_rows_have_no_windows_and_nothing_is_fetched(numbered: Callable[..., Tensor]) -> None:
    with Pipeline(numbered(8), batch_size=4, device="cpu") as pipe:
        list(pipe)
        stats = pipe.stats()
    assert (stats.mover, stats.batches, stats.rows, stats.windows, stats.rows_fetched) == ("local", 2, 8, 0, 0)
    assert (stats.bytes_staging, stats.bytes_pinned) == (0, 0)


def test_each_distinct_row_of_a_window_crosses_once(numbered: Callable[..., Tensor]) -> None:
    with Pipeline(
        numbered(8), batch_sampler=[[1, 2], [2, 3], [3, 1], [1, 1]] * 8, device="cpu", mover="copy", lookahead=16
    ) as pipe:
        list(pipe)
        stats = pipe.stats()
    assert stats.rows_fetched + stats.rows_carried <= 3 * stats.windows
    assert stats.rows_carried > 0
    assert stats.rows_fetched < stats.rows / 4


def test_windows_start_at_one_batch_and_grow_to_lookahead(numbered: Callable[..., Tensor]) -> None:
    with Pipeline(numbered(64), batch_size=1, device="cpu", mover="copy", lookahead=8) as pipe:
        sizes = [pipe.stats().batches_in_window for _ in pipe]
    assert sizes[0] == 1
    assert max(sizes) == 8


def test_a_changed_row_is_drained_once_a_window_and_only_its_column(numbered: Callable[..., Tensor]) -> None:
    source = {"w": numbered(8), "m": numbered(8)}
    with Pipeline(source, batch_sampler=[[0, 1]] * 10, device="cpu", mover="copy", lookahead=4, depth=2, writable=True) as pipe:
        for batch in pipe:
            batch.write_back({"m": batch.values["m"] + 1})
        pipe.flush()
        stats = pipe.stats()
    assert torch.equal(source["w"], numbered(8))
    assert 2 <= stats.rows_drained <= 2 * stats.windows
    assert stats.bytes_drained == stats.rows_drained * 12


def test_counts_go_on_over_epochs(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        for epoch in range(3):
            list(pipe)
            assert pipe.stats().batches == 2 * (epoch + 1)


def test_time_between_epochs_does_not_count(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        list(pipe)
        first = pipe.stats().seconds
        assert first > 0
        assert pipe.stats().seconds == first
        list(pipe)
        assert pipe.stats().seconds > first


def test_a_loop_that_waits_is_told_what_for(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    import threading

    store = SlowStore(ArrayStore(numbered(40)))
    with ahead(store, batch_size=4, lookahead=1, depth=1) as pipe:
        batches = iter(pipe)
        next(batches)
        store.reads.clear()
        opener = threading.Timer(0.3, store.reads.set)  # time is what is measured here
        opener.start()
        list(batches)
        opener.join()
        stats = pipe.stats()
    assert stats.wait_seconds["store"] > 0.2
    assert stats.waited <= stats.seconds
    assert stats.verdict.startswith("the store limits: ")


def test_a_snapshot_is_frozen_and_plain(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        list(pipe)
        stats = pipe.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.batches = 3  # type: ignore[misc]
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["batches"] == 2
    assert plain["verdict"] == stats.verdict


def test_staging_is_what_was_asked_for_at_most(numbered: Callable[..., Tensor]) -> None:
    for depth in (1, 2, 3):
        with Pipeline(numbered(8), batch_size=4, device="cpu", mover="copy", depth=depth, staging_bytes=100_000) as pipe:
            assert 99_000 < pipe.stats().bytes_staging <= 100_000


def test_memory_held_comes_to_rest(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    sizes = [1 + (k * 7) % 13 for k in range(200)]
    batches = [list(range(size)) for size in sizes]
    with ahead(numbered(40), batch_sampler=batches, writable=True) as pipe:
        for batch in pipe:
            batch.write_back()
        held = pipe.stats().bytes_pinned
        for batch in pipe:
            batch.write_back()
        assert pipe.stats().bytes_pinned <= 2 * max(held, 1)
        list(pipe)
        rested = pipe.stats().bytes_pinned
        list(pipe)
        assert pipe.stats().bytes_pinned == rested


def test_repr_says_what_it_does_and_how_it_is_doing(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(ArrayStore(numbered(1000)), batch_size=4) as pipe:
        assert repr(pipe).startswith("<Pipeline: ")
        for part in ("1,000 rows of 12 bytes", "read", "on cpu", "by copy", "epoch 0, batch 0", "no batch"):
            assert part in repr(pipe)
        batches = iter(pipe)
        next(batches)
        next(batches)
        assert "epoch 0, batch 2" in repr(pipe)
        assert " limits: " in repr(pipe)
        del batches
    with ahead({"w": numbered(10)}, batch_size=4, writable=True) as pipe:
        assert "w (10 rows" in repr(pipe)
        assert "written back" in repr(pipe)
    assert "closed" in repr(pipe)
