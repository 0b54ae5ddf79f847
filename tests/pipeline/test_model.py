"""Every run of small programs keeps the promise; without any one rule some run breaks it, or the rule only saves work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product

import pytest

from rowferry.pipeline.testing._model import Protocol
from rowferry.pipeline.testing._model_search import search
from rowferry.pipeline.testing._model_state import Batch, Case, Rules, Window

DEPTHS = (1, 2, 3, 4)
DEPTHS_IN_TURN = (1, 2, 3, pytest.param(4, marks=pytest.mark.long))  # the fourth takes most of the time
A, B, AB = (0,), (1,), (0, 1)


def cut(batches: tuple[Batch, ...], sizes: tuple[int, ...]) -> tuple[Window, ...]:
    """``batches`` in windows of ``sizes``."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(batches[start : start + size] for start, size in zip(starts, sizes, strict=True))


def programs(*sizes: int) -> Iterator[tuple[Window, ...]]:
    """All index sequences over two rows, up to their names, in windows of ``sizes``."""
    for batches in product((A, B, AB), repeat=sum(sizes)):
        first_single = next((batch for batch in batches if batch != AB), A)
        if first_single == A:
            yield cut(batches, sizes)


def singles(*batches: Batch) -> tuple[Window, ...]:
    """Windows of one batch."""
    return tuple((batch,) for batch in batches)


@cache
def holds(case: Case) -> None:
    """No run of ``case`` breaks the promise."""
    found = search(Protocol(case))
    assert found.wrong is None, f"{case}: {found.wrong}\n" + "\n".join(found.run)


# ---- the protocol is right ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)])
def test_every_run_sees_what_the_plain_loop_sees(sizes: tuple[int, ...], depth: int) -> None:
    for windows in programs(*sizes):
        holds(Case(windows, depth))
        holds(Case(windows, depth, writable=False))


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_may_go_unwritten_and_the_loop_may_close_at_any_time(depth: int) -> None:
    for windows in programs(1, 1, 1):
        holds(Case(windows, depth, skips=True, closes=True))
        holds(Case(windows, depth, writable=False, closes=True))


@pytest.mark.parametrize("depth", DEPTHS_IN_TURN)
def test_a_flush_at_any_time_has_all_in_the_store_and_changes_nothing_else(depth: int) -> None:
    for windows in (*programs(1, 1), *programs(2, 1), singles(A, B, A), singles(A, AB, B)):
        holds(Case(windows, depth, flushes=1))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_fetch_may_fail_at_any_time(depth: int) -> None:
    for windows in (*programs(2, 1), *programs(1, 2), singles(A, A, A), singles(A, AB, B)):
        holds(Case(windows, depth, failures=2))
        holds(Case(windows, depth, writable=False, failures=2))


@pytest.mark.parametrize("depth", DEPTHS)
def test_flush_failure_and_close_may_come_together(depth: int) -> None:
    for windows in (singles(A, A), singles(AB, B), ((A, B), (A,)), ((A,), (AB, A))):
        holds(Case(windows, depth, flushes=1, failures=1, closes=True))


@pytest.mark.parametrize("depth", DEPTHS_IN_TURN)
def test_rows_go_round_through_all_slots(depth: int) -> None:
    for windows in (singles(A, B, B, B, B, A), singles(A, A, A, A, A, A), singles(A, B, (2,), A, B, (2,))):
        holds(Case(windows, depth))
        holds(Case(windows, depth, writable=False))


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.timeout(900)
def test_all_of_it_on_all_small_programs(depth: int) -> None:
    for windows in (*programs(1, 1, 1), *programs(2, 1), *programs(1, 2)):
        holds(Case(windows, depth, skips=True, flushes=1, failures=1, closes=True))
    for windows in (*programs(1, 1, 1, 1), *programs(1, 1, 1, 1, 1)):
        holds(Case(windows, depth))


# ---- no rule is idle ----------------------------------------------------------------------------------------


def round_trip(depth: int) -> tuple[Window, ...]:
    """A row comes back when its slot does: others are used in between."""
    return singles(A, *[B] * (depth - 1), A)


def steady(depth: int) -> tuple[Window, ...]:
    """The same row in every window, one more than there are slots."""
    return singles(*[A] * (depth + 1))


def last_look(depth: int) -> tuple[Window, ...]:
    """A row is last carried by the window before the one that takes its slot."""
    return singles(A, *[B] * (depth - 2), AB, B)


# Rule, the depths where it is needed, a program that shows it. At the other depths that program has no wrong run.
NEEDED: list[tuple[str, tuple[int, ...], Case]] = [
    ("claim_after_written", DEPTHS, Case((), 0, writable=False)),
    ("claim_after_written", DEPTHS, Case((), 0, skips=True)),
    ("claim_after_landed", DEPTHS, Case((), 0)),
    ("claim_after_vacated", (2, 3, 4), Case((), 0, skips=True)),
    ("serve_after_ready", DEPTHS, Case((), 0)),
    ("drain_after_point", DEPTHS, Case((), 0)),
    ("drains_in_order", (2, 3, 4), Case((), 0)),
    ("carry_after_written", (2, 3, 4), Case((), 0)),
    ("carry_takes_mark", (2, 3, 4), Case((), 0, closes=True)),
    ("newest_source", (3, 4), Case((), 0)),
    ("source_before_depth", DEPTHS, Case((), 0)),
    ("drain_kept_at_close", (2, 3, 4), Case((), 0, closes=True)),
    ("drain_kept_at_failure", (2, 3, 4), Case((), 0, failures=1)),
    ("drain_kept_at_flush", (2, 3, 4), Case((), 0, flushes=1)),
    ("flush_drains_current", DEPTHS, Case((), 0, flushes=1)),
    ("flush_leaves_window_open", DEPTHS, Case((), 0, flushes=1, skips=True)),
]
ONLY_SAVES_WORK = ("drop_kept_from_drain", "mark_travels_one", "flush_clears_marks")


def without(rule: str, case: Case, depth: int) -> str | None:
    """What goes wrong first in ``case`` at ``depth`` without ``rule``."""
    rules = replace(Rules(), **{rule: False})
    for windows in (steady(depth), round_trip(depth), last_look(depth)):
        found = search(Protocol(replace(case, windows=windows, depth=depth), rules))
        if found.wrong is not None:
            assert found.run
            holds(replace(case, windows=windows, depth=depth))
            return found.wrong
    return None


@pytest.mark.parametrize("depth", DEPTHS_IN_TURN)
@pytest.mark.parametrize(("rule", "depths", "case"), NEEDED)
def test_a_run_goes_wrong_without_a_rule_at_the_depths_that_need_it(
    rule: str, depths: tuple[int, ...], case: Case, depth: int
) -> None:
    assert (without(rule, case, depth) is not None) == (depth in depths)


@pytest.mark.parametrize("depth", DEPTHS_IN_TURN)
def test_a_source_in_the_slot_that_is_taken_deadlocks(depth: int) -> None:
    rules = Rules(source_before_depth=False)
    for writable in (True, False):
        assert search(Protocol(Case(round_trip(depth), depth, writable=writable), rules)).wrong == "deadlock"


@pytest.mark.parametrize("depth", DEPTHS_IN_TURN)
@pytest.mark.parametrize("rule", ONLY_SAVES_WORK)
def test_a_rule_that_only_saves_work_may_be_left_out(rule: str, depth: int) -> None:
    for windows in (steady(depth), ((A, B), (A,)), singles(A, B, A)):
        found = search(Protocol(Case(windows, depth, flushes=1), replace(Rules(), **{rule: False})))
        assert found.wrong is None


@pytest.mark.parametrize("rule", ["claim_after_landed", "claim_after_vacated", "drains_in_order", "carry_takes_mark"])
@pytest.mark.parametrize("depth", DEPTHS_IN_TURN)
def test_reading_needs_only_written_and_ready(rule: str, depth: int) -> None:
    assert without(rule, Case((), 0, writable=False), depth) is None


def test_each_rule_is_accounted_for() -> None:
    assert {rule for rule, _, _ in NEEDED} | set(ONLY_SAVES_WORK) == {field.name for field in fields(Rules)}


def test_a_search_that_is_too_large_says_so() -> None:
    with pytest.raises(RuntimeError, match="more than 10 states"):
        search(Protocol(Case(steady(2), 2)), most=10)
