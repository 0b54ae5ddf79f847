"""Which way takes the next window: tried, chosen, and tried again. Numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.pipeline._trial import CLEARLY, FALLEN, FAR, OTHER, ROUNDS, SETTLE, SEVERAL, STEADY, Trial

MIB = 1 << 20
Rates = Callable[[int, int], float]
"""Bytes a second of a way at a window's number."""


def trial(ways: int = 2, told: list[str] | None = None) -> Trial:
    return Trial([f"way {number}" for number in range(ways)], settled=(told if told is not None else []).append)


def run(judge: Trial, sizes: Sequence[int], rate: Rates, late: int = 1) -> list[int]:
    """The way that each window took. What a window took is known ``late`` windows later."""
    turns: list[int] = []
    for number, nbytes in enumerate(sizes):
        if number >= late:
            old = number - late
            judge.measured(turns[old], sizes[old], sizes[old] / rate(turns[old], old))
        turns.append(judge.turn)
        judge.begun(nbytes)
    return turns


def steady(*gb_s: float) -> Rates:
    return lambda way, number: gb_s[way] * 1e9


@given(
    sizes=st.lists(st.integers(1, 1 << 30), min_size=SETTLE, max_size=SETTLE),
    rates=st.lists(st.floats(0.1, 60), min_size=2, max_size=4),
    late=st.integers(1, 6),
)
@settings(max_examples=200)
def test_a_choice_is_made_within_twenty_windows_whatever_their_sizes(sizes: list[int], rates: list[float], late: int) -> None:
    judge = trial(len(rates))
    run(judge, sizes, steady(*rates), late)
    assert judge.settled


@given(rates=st.lists(st.floats(0.1, 60), min_size=2, max_size=3), late=st.integers(1, 3), growing=st.integers(0, 10))
@settings(max_examples=200)
def test_the_choice_is_the_fastest_or_one_before_it_that_is_not_clearly_slower(
    rates: list[float], late: int, growing: int
) -> None:
    judge = trial(len(rates))
    sizes = [min(2**number, 2**growing) * MIB for number in range(SETTLE)]
    run(judge, sizes, steady(*rates), late)
    assert rates[judge.turn] * CLEARLY >= max(rates) * (1 - 1e-9)
    assert all(rate * CLEARLY < max(rates) * (1 + 1e-9) for rate in rates[: judge.turn])


def test_windows_that_grow_go_by_the_preferred_way() -> None:
    judge = trial()
    turns = run(judge, [2**number * MIB for number in range(6)] + [32 * MIB] * 10, steady(20, 10))
    assert set(turns[:7]) == {0}
    assert turns[7:].count(1) == ROUNDS


def test_the_rates_of_small_windows_do_not_count() -> None:
    """The second way is faster in small windows and slower in large ones."""
    judge = trial()
    sizes = [MIB] * 3 + [64 * MIB] * (SETTLE - 3)
    run(judge, sizes, lambda way, number: 1e9 * (10, 40 if sizes[number] == MIB else 5)[way])
    assert judge.turn == 0


def test_what_a_way_pays_once_is_not_held_against_it() -> None:
    seen: set[int] = set()

    def rate(way: int, number: int) -> float:
        first = way not in seen
        seen.add(way)
        return 1e9 if first else (10e9, 30e9)[way]

    judge = trial()
    run(judge, [MIB] * SETTLE, rate)
    assert judge.turn == 1


def test_a_rate_that_falls_for_several_windows_is_seen_and_the_other_way_is_taken() -> None:
    told: list[str] = []
    judge = trial(told=told)
    run(judge, [MIB] * 100, lambda way, number: 1e9 * (40 if number < 50 else 5, 20)[way])
    assert judge.turn == 1
    assert len(told) == 2
    assert told[0].startswith("way 0: 40 GB/s against 20 GB/s by way 1, in windows of 1 MiB")
    assert told[1].startswith("tried again (way 0 fell from 40 to 5 GB/s); way 1: 20 GB/s against 5 GB/s by way 0")


def test_the_new_choice_is_made_within_twenty_windows_of_the_fall() -> None:
    judge = trial()
    turns = run(judge, [MIB] * 100, lambda way, number: 1e9 * (40 if number < 50 else 5, 20)[way])
    assert set(turns[50 + SETTLE :]) == {1}


def test_a_rate_that_falls_for_fewer_windows_changes_nothing() -> None:
    told: list[str] = []
    judge = trial(told=told)
    run(judge, [MIB] * 200, lambda way, number: 1e9 * (5 if number % SEVERAL and number > 50 else 40, 20)[way])
    assert len(told) == 1


def test_a_rate_that_falls_less_than_a_third_changes_nothing() -> None:
    told: list[str] = []
    judge = trial(told=told)
    run(judge, [MIB] * 200, lambda way, number: 1e9 * (40 if number < 50 else 40 * FALLEN + 0.1, 20)[way])
    assert (judge.turn, len(told)) == (0, 1)


def test_a_rate_that_falls_and_is_still_the_best_changes_nothing_unless_it_falls_far() -> None:
    def told_after(share: float) -> list[str]:
        told: list[str] = []
        run(trial(told=told), [MIB] * 200, lambda way, number: 1e9 * (40 if number < 50 else share * 40, 10)[way])
        return told

    assert len(told_after(0.5)) == 1
    assert len(told_after(0.9 * FAR)) == 2


def test_new_tries_of_a_rate_that_goes_up_and_down_become_rare() -> None:
    told: list[str] = []
    run(trial(told=told), [MIB] * 2_000, lambda way, number: 1e9 * (40 if number // 30 % 2 else 10, 5)[way])
    assert len(told) <= 5


def test_windows_of_another_size_are_tried_anew() -> None:
    told: list[str] = []
    sizes = [MIB] * 40 + [64 * MIB] * (OTHER + SETTLE)
    judge = trial(told=told)
    run(judge, sizes, lambda way, number: 1e9 * ((40, 20), (20, 40))[sizes[number] > MIB][way])
    assert judge.turn == 1
    assert "windows of 64 instead of 1 MiB" in told[1]


def test_windows_that_are_large_anyway_are_not_of_another_size() -> None:
    told: list[str] = []
    run(trial(told=told), [STEADY] * SETTLE + [40 * STEADY] * 3 * OTHER, steady(40, 20))
    assert len(told) == 1


def test_a_single_small_window_at_the_end_of_an_epoch_is_not_another_size() -> None:
    told: list[str] = []
    run(trial(told=told), ([MIB] * 30 + [MIB // 10]) * 10, steady(40, 20))
    assert len(told) == 1


def test_nothing_measured_keeps_the_preferred_way_and_says_so() -> None:
    judge = trial()
    for _ in range(SETTLE):
        judge.begun(MIB)
    assert judge.turn == 0
    assert "nothing could be measured" in judge.why


def test_a_slower_choice_says_why_it_was_preferred() -> None:
    told: list[str] = []
    run(trial(told=told), [MIB] * SETTLE, steady(40, 42))
    assert told == [
        "way 0: 40 GB/s against 42 GB/s by way 1, in windows of 1 MiB; what is not 10% faster is not worth its host threads"
    ]


def test_two_trials_side_by_side_meet_all_pairs() -> None:
    reading, writing = trial(), Trial(["way 0", "way 1"], in_turn=False, settled=list[str]().append)
    pairs = list(zip(run(reading, [MIB] * 10, steady(1, 1), 5), run(writing, [MIB] * 10, steady(1, 1), 5), strict=True))
    assert set(pairs) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_each_way_is_tried_more_than_once(ways: int) -> None:
    judge = trial(ways)
    turns = run(judge, [MIB] * SETTLE, steady(*[10.0] * ways), late=2)
    assert all(turns.count(way) >= 2 for way in range(ways))
    assert any(one != other for one, other in pairwise(turns))
