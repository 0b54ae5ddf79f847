"""Closing, stores that never return, forked children, and what a pipeline leaves alone."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline._engine import Threads
from rowferry.stores import ArrayStore, open_store
from rowferry.stores._devices import CpuDevice
from rowferry.stores.testing import CostlyStore, SlowStore

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


# ---- closing ----------------------------------------------------------------------------------------------------


def test_close_may_be_called_twice_and_nothing_works_after(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    pipe = pipeline(numbered(8), batch_size=4)
    batches = iter(pipe)
    next(batches)
    pipe.close()
    pipe.close()
    assert our_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        iter(pipe)
    with pytest.raises(RuntimeError, match="closed"):
        pipe.flush()
    assert "closed" in repr(pipe)


def test_close_before_the_first_epoch_is_fine(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    pipeline(numbered(8), batch_size=4).close()


def test_batches_outlive_their_pipeline(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        kept = [batch.data for batch in pipe]
    del pipe
    gc.collect()
    assert torch.equal(torch.cat(kept), numbered(8))


@pytest.mark.parametrize("mover", ["auto", "copy"])
def test_close_closes_the_stores_that_were_paths_and_no_others(
    numbered: Callable[..., Tensor], tmp_path: Path, mover: Any
) -> None:
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path in paths:
        np.save(path, numbered(8).numpy())
    with open_store(paths[1]) as own:
        pipe = Pipeline({"a": paths[0], "b": own, "c": numbered(8)}, batch_size=4, device="cpu", mover=mover)
        assert len(list(pipe)) == 2
        assert str(paths[0]) in Path("/proc/self/maps").read_text()
        pipe.close()
        assert str(paths[0]) not in Path("/proc/self/maps").read_text()
        assert torch.equal(own.gather(range(8)), numbered(8))
    assert "closed" in repr(pipe)
    assert pipe.stats().batches == 2


def test_a_store_that_a_thread_is_stuck_in_is_left_open(ahead: Make, stuck: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowferry.pipeline._source.as_store", lambda member: stuck)
    pipe = ahead("a path", batch_size=4)
    batches = iter(pipe)
    assert stuck.blocked.wait(5)
    pipe.close()
    assert not stuck.closed
    del batches


@pytest.fixture
def stuck(numbered: Callable[..., Tensor]) -> Iterator[SlowStore]:
    """A store whose reads do not return before the test is over."""
    store = SlowStore(ArrayStore(numbered(40)))
    store.reads.clear()
    yield store
    store.reads.set()


def test_close_does_not_wait_for_a_store_that_never_returns(
    ahead: Make, stuck: SlowStore, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = ahead(stuck, batch_size=4)
    batches = iter(pipe)
    assert stuck.blocked.wait(5)
    begun = time.monotonic()
    with caplog.at_level(logging.ERROR, "rowferry"):
        pipe.close()
    assert time.monotonic() - begun < 5
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "rowferry-producer" in caplog.text
    del batches


@pytest.mark.parametrize("threads", [1, 3])
def test_a_window_of_many_slow_reads_ends_after_the_reads_under_way(
    ahead: Make,
    numbered: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    threads: int,
) -> None:
    monkeypatch.setattr("rowferry.pipeline._copy.PIECE_BYTES", 12)  # a row
    host, reads = Threads(CpuDevice(), threads), list[int]()

    def hold(nbytes: int) -> None:  # until the epoch is being ended
        reads.append(nbytes)
        host.notify()
        host.wait(lambda: host.stopping)

    pipe = ahead(CostlyStore(ArrayStore(numbered(400)), read=hold), batch_size=200, threads=threads)
    pipe._new_host = lambda: host
    with caplog.at_level(logging.ERROR, "rowferry"):
        batches = iter(pipe)
        assert host.wait(lambda: bool(reads), timeout=5)
        pipe.close()
    del batches
    assert caplog.records == []
    assert len(reads) <= 4 * threads
    assert our_threads() == []


def test_dropping_does_not_wait_for_a_store_that_never_returns(ahead: Make, stuck: SlowStore) -> None:
    pipe = ahead(stuck, batch_size=4)
    batches = iter(pipe)
    assert stuck.blocked.wait(5)
    begun = time.monotonic()
    del batches, pipe
    gc.collect()
    assert time.monotonic() - begun < 5


def test_a_read_that_comes_back_late_does_not_touch_the_next_epoch(
    ahead: Make, numbered: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, release, reads = threading.Event(), threading.Event(), list[int]()

    def hold(nbytes: int) -> None:  # the second read, which goes to the second slot
        reads.append(nbytes)
        if len(reads) == 2:
            held.set()
            release.wait(30)

    order = [[row] for row in range(4)]
    with ahead(CostlyStore(ArrayStore(numbered(40)), read=hold), batch_sampler=order, lookahead=1) as pipe:
        batches = iter(pipe)
        next(batches)
        assert held.wait(5)
        order[:] = [[row] for row in range(20, 24)]
        monkeypatch.setattr(logging.getLogger("rowferry"), "warning", lambda *message: release.set())
        rows = torch.cat([batch.data for batch in pipe])
    assert torch.equal(rows, numbered(40)[20:24])
    assert release.is_set()  # it was said that the epoch waits
    del batches


def test_an_interpreter_that_exits_in_mid_epoch_does_not_hang(numbered: Callable[..., Tensor]) -> None:
    program = """
import torch, rowferry as rf
pipe = rf.Pipeline(torch.zeros(1000, 4), batch_size=2, device="cpu", mover="copy", lookahead=4, writable=True)
batches = iter(pipe)
next(batches).write_back()
next(batches)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- forks ------------------------------------------------------------------------------------------------------


def _child(pipe: Pipeline, batches: Any, answers: Any) -> None:
    said = []
    for call in (lambda: iter(pipe), pipe.flush, lambda: next(batches)):
        try:
            call()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    answers.put(said)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mover", ["local", "copy"])
def test_a_forked_child_is_told_to_spawn(numbered: Callable[..., Tensor], mover: Any) -> None:
    context = multiprocessing.get_context("fork")
    with Pipeline(numbered(40), batch_size=4, device="cpu", mover=mover) as pipe:
        batches = iter(pipe)
        next(batches)
        answers = context.SimpleQueue()
        child = context.Process(target=_child, args=(pipe, batches, answers))
        child.start()
        child.join(10)
        if child.is_alive():
            child.kill()
            child.join()
            pytest.fail("the forked child hangs")
        assert [("spawn" in said) for said in answers.get()] == [True, True, True]
        assert len(list(batches)) == 9


# ---- manners ----------------------------------------------------------------------------------------------------


def test_nothing_is_printed(pipeline: Make, numbered: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]) -> None:
    with pipeline(numbered(40), batch_size=4, writable=True) as pipe:
        for batch in pipe:
            batch.write_back()
        pipe.flush()
    assert tuple(capfd.readouterr()) == ("", "")


def test_what_was_decided_goes_to_the_logger(
    ahead: Make, numbered: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rowferry"), ahead(numbered(40), batch_size=4):
        pass
    assert {record.name.partition(".")[0] for record in caplog.records} == {"rowferry"}
    assert "copy" in caplog.text
    assert "cpu" in caplog.text


def test_nothing_of_the_process_is_touched(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    torch.manual_seed(3)
    state, threads, grad = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        list(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled() == grad


def test_batches_made_in_inference_mode_are_right_and_so_are_those_after(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    with torch.inference_mode():
        pipe = pipeline(numbered(8), batch_size=4)
        assert torch.equal(torch.cat([batch.data for batch in pipe]), numbered(8))
    with pipe:
        for batch in pipe:
            weight = torch.ones(3, requires_grad=True)
            (batch.data * weight).sum().backward()
            assert weight.grad is not None
