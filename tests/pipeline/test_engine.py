"""The hosts: threads that end, errors that arrive, and a host without threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rowferry.pipeline._engine import Inline, Task, Threads, pause
from rowferry.stores._devices import CpuDevice


def nothing(error: BaseException) -> None:
    raise AssertionError("a task failed") from error


def test_a_task_runs_when_its_predicate_holds_and_not_before() -> None:
    host = Threads(CpuDevice(), 1)
    seen: list[str] = []
    go: list[int] = []

    def task() -> Task:
        yield lambda: bool(go)
        seen.append("ran")
        host.notify()

    host.start("t", task(), nothing)
    assert not host.wait(lambda: bool(seen), timeout=0.01)
    go.append(1)
    host.notify()
    assert host.wait(lambda: bool(seen), timeout=5)
    assert host.stop(5) == []


def test_stop_ends_a_task_that_waits_for_ever_and_runs_its_cleanup() -> None:
    host, ended = Threads(CpuDevice(), 1), threading.Event()

    def task() -> Task:
        try:
            yield lambda: False
        finally:
            ended.set()

    host.start("t", task(), nothing)
    assert host.stop(5) == []
    assert ended.is_set()


def test_stop_names_a_thread_that_is_stuck() -> None:
    host, stuck, release = Threads(CpuDevice(), 1), threading.Event(), threading.Event()

    def task() -> Task:
        stuck.set()
        release.wait(30)
        yield lambda: True

    host.start("reader", task(), nothing)
    assert stuck.wait(5)
    assert host.stop(0.01) == ["rowferry-reader"]
    release.set()
    assert host.stop(5) == []


def test_an_error_that_a_task_lets_escape_is_handed_on() -> None:
    host = Threads(CpuDevice(), 1)
    errors: list[BaseException] = []

    def task() -> Task:
        yield lambda: True
        raise OSError("bug")

    host.start("t", task(), errors.append)
    assert host.wait(lambda: bool(errors), timeout=5)
    host.stop(5)
    assert isinstance(errors[0], OSError)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parts_are_spread_and_the_first_error_rises(threads: int) -> None:
    host, done, lock = Threads(CpuDevice(), threads), [], threading.Lock()

    def work(part: int) -> None:
        if part == 3:
            raise ValueError("part 3")
        with lock:
            done.append(part)

    host.spread(work, range(3), most=threads)
    assert sorted(done) == [0, 1, 2]
    with pytest.raises(ValueError, match="part 3"):
        host.spread(work, range(6), most=threads)
    assert host.stop(5) == []


def test_inline_tasks_run_only_while_the_caller_waits() -> None:
    host: Any = Inline()
    ran: list[int] = []

    def task() -> Task:
        for number in range(3):
            ran.append(number)
            yield lambda number=number: len(ran) > number  # type: ignore[misc]

    host.start("t", task(), nothing)
    assert ran == []
    host.wait(lambda: len(ran) >= 1)
    assert ran == [0]  # and no step further
    host.wait(lambda: len(ran) >= 3)
    host.stop(0)


def test_inline_says_when_everybody_waits() -> None:
    def task() -> Iterator[Any]:
        yield lambda: False

    host: Any = Inline()
    host.start("t", task(), nothing)
    with pytest.raises(RuntimeError, match="waits for itself"):
        host.wait(lambda: False)
    host.stop(0)


def test_a_task_that_pauses_goes_on_until_its_host_stops() -> None:
    host = Threads(CpuDevice(), 1)
    rounds: list[int] = []

    def task() -> Task:
        while True:
            rounds.append(len(rounds))
            host.notify()
            yield pause

    host.start("t", task(), nothing)
    assert host.wait(lambda: len(rounds) > 2, timeout=5)
    assert host.stop(5) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_spread_while_the_host_stops_is_done_all_the_same(threads: int) -> None:
    host, stopping, done = Threads(CpuDevice(), threads), threading.Event(), list[int]()
    host.spread(done.append, range(4), most=threads)  # its threads have started

    def task() -> Task:
        stopping.wait(30)
        host.spread(done.append, range(10, 14), most=threads)
        yield pause

    host.start("t", task(), nothing)
    assert host.stop(0.01) == ["rowferry-t"]
    stopping.set()
    assert host.stop(5) == []
    assert sorted(done) == [0, 1, 2, 3, 10, 11, 12, 13]
