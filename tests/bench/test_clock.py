"""Time is kept: a measurement ends with its slice, and its figures are those of its runs."""

from __future__ import annotations

import pytest

from rowferry._bench.clock import NEVER, RUNS, Budget, Slice, Timing, clock, figures, fixed, paced, timed
from rowferry.stores._devices import CpuDevice


def test_figures_are_the_median_and_the_ends() -> None:
    assert figures([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 3)


def test_a_fixed_number_of_runs_does_what_it_says() -> None:
    asked = []

    def run(count: int, stop: float) -> Timing:
        asked.append((count, stop))
        return Timing(count, 2.0 * count)

    assert fixed(run, 7, 3) == (2.0, 2.0, 2.0, 3)
    assert asked == [(7, NEVER)] * 3


def test_runs_grow_until_they_are_as_long_as_their_share_and_short_ones_do_not_count() -> None:
    counts = []

    def run(count: int, stop: float) -> Timing:
        del stop
        counts.append(count)
        return Timing(count, 0.001 * count if len(counts) > 1 else 5e-9)  # the first claims to be very fast

    found = paced(run, Slice(0.7, clock() + 0.7))
    assert counts[:2] == [1, 8]  # at most eight times the one before
    assert max(counts) <= 110
    assert found.runs == RUNS
    assert found.median == pytest.approx(0.001)


def test_a_run_that_takes_longer_than_the_slice_is_the_only_one() -> None:
    asked = []

    def run(count: int, stop: float) -> Timing:
        asked.append(stop)
        while clock() < stop:
            pass
        return Timing(1, 3.0)

    part = Slice(0.01, clock() + 0.01)
    assert paced(run, part) == (3.0, 3.0, 3.0, 1)
    assert asked == [part.stop]


def test_a_slice_that_is_over_already_still_gives_a_figure() -> None:
    assert paced(lambda count, _stop: Timing(count, 0.5), Slice(0.0, clock())).runs == 1


def test_a_budget_is_given_out_by_weight_and_what_is_saved_goes_to_the_rest() -> None:
    budget = Budget(100.0)
    first = budget.slice(1, 4)
    assert first.seconds == pytest.approx(25, abs=1)
    assert budget.slice(1, 3).seconds == pytest.approx(100 / 3, abs=1)  # nothing was used
    assert Budget(-1.0).left() == 0


def test_each_call_is_timed() -> None:
    calls: list[int] = []
    assert len(timed(lambda: calls.append(1), CpuDevice(), 4)) == len(calls) == 4
