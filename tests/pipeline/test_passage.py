"""What a wait was a wait for, worked out from what was noted on a window's way; and events put on the host's clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.pipeline._clock import ANCHOR_SECONDS, Clock
from rowferry.pipeline._passage import Cause, Span, Timed, split
from rowferry.stores._devices import CpuDevice
from rowferry.stores.testing import SimulatedDevice

STEPS: tuple[tuple[float, Cause], ...] = ((1.0, "link"), (2.0, "sampler"), (4.0, "plan"), (5.0, "drain"), (9.0, "store"))


def timed(wait: Span, number: int = 3) -> Timed:
    return Timed(number, 800, STEPS, Span(5.0, 9.0), wait)


@pytest.mark.parametrize(
    ("wait", "parts"),
    [
        (Span(0.0, 9.0), {"link": 1.0, "sampler": 1.0, "plan": 2.0, "drain": 1.0, "store": 4.0}),
        (Span(3.0, 9.0), {"plan": 1.0, "drain": 1.0, "store": 4.0}),
        (Span(8.5, 9.5), {"store": 1.0}),  # who woke late waited for the last step
        (Span(9.0, 9.5), {}),  # it was there
    ],
)
def test_a_wait_is_for_what_the_window_was_at(wait: Span, parts: dict[str, float]) -> None:
    assert {cause: span.seconds for cause, span in timed(wait).waits()} == parts


def test_what_the_training_waited_for_transfer_was_not_hidden() -> None:
    assert timed(Span(0.0, 9.0)).exposed == 5.0  # the drain and the fetch
    assert timed(Span(7.0, 9.0)).exposed == 2.0
    assert timed(Span(9.5, 9.6)).exposed == 0.0
    assert timed(Span(0.0, 9.0)).rate == 200.0


def test_the_first_window_is_one_wait() -> None:
    assert timed(Span(0.0, 9.0), number=0).waits() == [("cold start", Span(0.0, 9.0))]
    assert timed(Span(0.0, 9.0), number=0).exposed == 5.0


@settings(max_examples=60)
@given(st.floats(0, 20), st.floats(0, 20), st.lists(st.tuples(st.floats(0, 20), st.sampled_from(["link", "plan"])), max_size=5))
def test_no_moment_of_a_wait_is_lost_or_told_twice(start: float, length: float, steps: list[tuple[float, Cause]]) -> None:
    wait = Span(start, start + length)
    parts = [span for _, span in split(wait, steps)]
    assert all(before.stop == after.start for before, after in itertools.pairwise(parts))
    if parts:
        assert (parts[0].start, parts[-1].stop) == wait
    else:
        assert not any(until > start for until, _ in steps) or wait.stop == start


# ---- the clock --------------------------------------------------------------------------------------------------


def test_an_event_passes_on_the_hosts_clock_when_the_work_before_it_is_done() -> None:
    device = SimulatedDevice()
    clock = Clock(device)
    device.spend(2.0)
    assert not clock.ready()  # the anchor is on its way
    for _ in range(3):
        device.launch("work", lambda: None)
    event = clock.mark(device.current())
    device.drain()
    assert clock.ready()
    assert clock.at(event) == pytest.approx(2.003)


def test_a_fresh_anchor_is_taken_now_and_then_and_older_events_stay_where_they_were() -> None:
    device = SimulatedDevice()
    clock = Clock(device)
    assert not clock.ready()
    event = clock.mark(device.current())
    device.drain()
    assert clock.ready()
    before = clock.at(event)
    device.spend(ANCHOR_SECONDS + 1)
    assert clock.ready()
    device.drain()
    assert clock.ready()
    assert clock.at(event) == pytest.approx(before)
    assert device.record(device.current(), timing=True).query() is False


def test_an_anchor_that_was_late_is_corrected_by_an_event_that_cannot_be_so_early() -> None:
    device = SimulatedDevice()
    clock = Clock(device)
    device.launch("work", lambda: None)
    with device.use(clock._stream):  # the anchor's stream is busy, which the clock does not know
        device.launch("in the way", lambda: None)
    assert not clock.ready()
    event = clock.mark(device.current())
    device.drain()
    assert clock.ready()
    assert clock.at(event) == pytest.approx(0.0)  # a millisecond early
    clock.not_before(event, 0.001)
    assert clock.at(event) == pytest.approx(0.001)
    clock.not_before(event, 0.0)
    assert clock.at(event) == pytest.approx(0.001)


def test_on_a_cpu_events_are_moments() -> None:
    clock = Clock(CpuDevice())
    start = clock.now()
    assert clock.ready()
    event = clock.mark("any")
    assert start <= clock.at(event) <= clock.now() + 1e-4
