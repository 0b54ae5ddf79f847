"""The points of a slot, told as a story; what is out of order is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowferry.pipeline import Pipeline
from rowferry.pipeline._engine import Inline
from rowferry.pipeline._slots import Point, Slots


def through(slots: Slots, number: int, *, until: Point) -> None:
    """Take a planned window on to ``until``."""
    steps = (
        (Point.FILLING, slots.claim),
        (Point.READY, slots.fill),
        (Point.CURRENT, slots.begin),
    )
    for point, step in steps:
        if slots.point(number) < point <= until:
            step(number)
    if until >= Point.ENDED:
        slots.end(number, keep=True)
    if until is Point.WRITTEN:
        slots.written(number)


def test_a_window_passes_its_points_in_order() -> None:
    slots = Slots(2)
    assert repr(slots) == "<Slots depth 2: all free>"
    slots.plan(0, [])
    assert slots.may_claim(0)
    through(slots, 0, until=Point.CURRENT)
    slots.plan(1, [0])
    assert repr(slots) == "<Slots depth 2: 0:current 1:planned>"
    with pytest.raises(RuntimeError, match="window 1 is PLANNED, not READY"):
        slots.begin(1)


def test_a_slot_is_taken_again_only_after_written_landed_and_vacated() -> None:
    slots = Slots(2)
    slots.plan(0, [])
    through(slots, 0, until=Point.CURRENT)
    slots.plan(1, [0])
    through(slots, 1, until=Point.READY)
    slots.plan(2, [])
    assert not slots.may_claim(2)  # not written
    through(slots, 0, until=Point.WRITTEN)
    slots.queue_drain(0)
    assert not slots.may_claim(2)  # not landed, and rows are kept for window 1
    slots.drained(0)
    assert not slots.may_claim(2)  # not vacated
    slots.begin(1)
    slots.copied(1)
    assert slots.may_claim(2)
    slots.claim(2)
    assert repr(slots) == "<Slots depth 2: 1:current 2:filling>"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_source_is_never_the_window_whose_slot_is_taken(depth: int) -> None:
    slots = Slots(depth)
    for number in range(depth + 1):
        assert list(slots.candidates(number)) == list(range(max(0, number - depth + 1), number))
        slots.plan(number, slots.candidates(number)[:0])
    with pytest.raises(ValueError, match=rf"window {depth} names window 0 as a source"):
        slots.plan(depth, [0])


def test_rows_are_kept_only_for_a_window_that_was_planned_in_time() -> None:
    slots = Slots(2)
    slots.plan(0, [])
    through(slots, 0, until=Point.CURRENT)
    assert not slots.end(0, keep=True)  # window 1 has no plan: everything is drained
    slots.written(0)
    slots.plan(1, [0])
    assert slots.kept() == []


def test_a_plan_that_is_void_gives_kept_rows_back_to_their_slot() -> None:
    slots = Slots(2)
    slots.plan(0, [])
    through(slots, 0, until=Point.CURRENT)
    slots.plan(1, [0])
    assert slots.end(0, keep=True)
    slots.written(0)
    assert slots.kept() == [0]
    assert slots.unplan(1)
    assert slots.kept() == []
    assert not slots.planned(1)
    assert slots.landed(0)


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is 0"):
        Slots(0)


class Watching:
    """A lock that looks at a run whenever somebody comes to it, as another thread might just then."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.run: Any = None

    def __enter__(self) -> Any:
        if self.run is not None:
            for number, window in self.run.windows.items():
                assert window.ready is None or self.run.slots.point(number) >= Point.READY
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)


@pytest.mark.parametrize("writable", [False, True])
def test_a_window_looks_ready_to_the_consumer_only_when_its_slot_is(writable: bool) -> None:
    host: Any = Inline()
    host.lock = Watching(host.lock)
    with Pipeline(torch.zeros(40, 2), batch_size=4, device="cpu", mover="copy", writable=writable) as pipe:
        pipe._new_host = lambda: host
        batches = iter(pipe)
        host.lock.run = batches._server.run  # type: ignore[union-attr]  # windows are in flight there
        assert len(list(batches)) == 10
