"""Movers that change between windows: rows that one wrote are read by another, and each waits for what it must."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rowferry.pipeline import _runs
from rowferry.pipeline.testing._plain_loop import Program, Setting, require_equal, run_pipeline

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = 150


def rows_that_come_back(seed: int) -> tuple[Program, Setting]:
    """Windows of one batch of a row or two, half of them written: a row comes back when the windows between were clean."""
    rng = random.Random(seed)
    batches = tuple(tuple(rng.sample(range(5), rng.choice((1, 1, 2)))) for _ in range(rng.randrange(6, 14)))
    written = frozenset(number for number in range(len(batches)) if rng.random() < 0.5)
    program = Program(5, batches, written, frozenset(number for number in written if rng.random() < 0.2))
    return program, Setting(lookahead=rng.choice((1, 1, 2)), depth=rng.choice((2, 2, 3)), mover="changing", slot_rows=16)


def rows_in_runs(seed: int) -> tuple[Program, Setting]:
    """Batches that are ranges, apart or over each other, most of them written: windows cross as plain copies, or nearly."""
    rng = random.Random(seed)
    batches = []
    for _ in range(rng.randrange(2, 12)):
        start, length = rng.randrange(30), rng.choice((1, 2, 4, 6))
        batch = list(range(start, min(start + length, 32)))
        if rng.random() < 0.1 and len(batch) > 2:
            batch[1] = batch[0]  # its ends look like a range's
        batches.append(tuple(batch))
    written = frozenset(number for number in range(len(batches)) if rng.random() < 0.8)
    flushed = frozenset(number for number in range(len(batches)) if rng.random() < 0.2)
    program = Program(32, tuple(batches), written, frozenset(n for n in written if rng.random() < 0.2), flushed)
    mover = rng.choice(("changing", "copy", "zero-copy"))
    return program, Setting(lookahead=rng.choice((1, 2, 4)), depth=rng.choice((1, 1, 2, 3)), mover=mover, slot_rows=64)


@pytest.mark.parametrize("draw", [rows_that_come_back, rows_in_runs])
def test_any_schedule_with_changing_movers_equals_the_plain_loop(
    draw: Callable[[int], tuple[Program, Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runs, "RUN_BYTES", 1)  # any number of runs goes as plain copies
    for seed in range(SEEDS):
        program, setting = draw(seed)
        try:
            require_equal(program, setting, run_pipeline(program, setting, seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: {program} {setting}")
            raise
