"""Rows that follow each other in the table cross as plain copies, both ways, and what only looks so does not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.pipeline._flight import Asked
from rowferry.pipeline._runs import RUN_BYTES, are_few, runs_of
from rowferry.pipeline.testing._machine import BATCH, ROWS, WIDTH, Machine, read_all, table


@pytest.mark.parametrize("mover", ["auto", "copy", "zero-copy"])
def test_rows_in_order_go_as_plain_copies_without_a_kernel_or_a_host_thread(mover: str) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), table()
    with machine.pipeline(machine.store(memory), batch_sampler=None, batch_size=BATCH, mover=mover) as pipe:
        found = read_all(pipe)
    assert torch.equal(torch.cat([rows for _, rows in found]), memory)
    assert set(machine.moved) == {"copy on fetch"}


@pytest.mark.parametrize(
    "batches",
    [
        [range(50), range(50, 120)],
        [slice(10, 60), np.arange(60, 70)],
        [np.arange(30, 40), np.arange(0, 35)],
        [[3, 4, 5], [], [6]],
    ],
    ids=["ranges", "a slice and an array", "over each other", "lists"],
)
def test_batches_that_make_up_a_range_cross_as_one_copy(batches: Any) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), table()
    with machine.pipeline(machine.store(memory), batch_sampler=batches, depth=1, lookahead=1, mover="zero-copy") as pipe:
        found = read_all(pipe)
    assert all(torch.equal(rows, memory[index]) for index, rows in found)
    assert machine.device.ran["fetch"] == 0


def test_what_only_looks_like_a_range_is_gathered() -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), table()
    batches = [[5, 5, 7], [20, 90, 22], [40, 42, 44]]
    with machine.pipeline(machine.store(memory), batch_sampler=batches, depth=1, lookahead=1, mover="zero-copy") as pipe:
        found = read_all(pipe)
    assert all(torch.equal(rows, memory[index]) for index, rows in found)
    assert machine.device.ran["fetch"] == len(batches)


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
def test_a_store_that_is_filled_in_order_is_written_by_plain_copies(mover: str) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), torch.zeros(ROWS, WIDTH)
    settings: dict[str, Any] = {"batch_sampler": None, "batch_size": BATCH, "writable": True, "fetch": False, "mover": mover}
    with machine.pipeline(machine.store(memory), **settings) as pipe:
        for number, batch in enumerate(pipe):
            batch.write_back(torch.full((BATCH, WIDTH), float(number)))
        pipe.flush()
    assert torch.equal(memory[:, 0], torch.arange(ROWS).div(BATCH, rounding_mode="floor").float())
    assert set(machine.moved) == {"copy on writer"}


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
def test_rows_that_were_not_written_back_stay_although_the_others_make_a_range_with_them(mover: str) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), torch.zeros(ROWS, WIDTH)
    settings: dict[str, Any] = {"batch_sampler": None, "batch_size": BATCH, "writable": True, "fetch": False, "mover": mover}
    with machine.pipeline(machine.store(memory), **settings) as pipe:
        for number, batch in enumerate(pipe):
            if number % 3:
                batch.write_back(torch.ones(BATCH, WIDTH))
    expected = (torch.arange(ROWS) // BATCH % 3 != 0).float()
    assert torch.equal(memory[:, 0], expected)


SPANS = st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda span: list(range(span[0], span[0] + span[1])))
BATCHES = st.lists(st.one_of(SPANS, st.lists(st.integers(0, 40), max_size=6)), min_size=1, max_size=6)


@given(batches=BATCHES)
@settings(max_examples=200)
def test_runs_are_just_the_rows_asked_for_or_not_known(batches: list[list[int]]) -> None:
    asked = [Asked((len(batch),), len(batch), np.array(batch, np.int64)) for batch in batches]
    distinct = sorted({row for batch in batches for row in batch})
    runs = runs_of(asked, len(distinct))
    if all(batch == list(range(batch[0], batch[-1] + 1)) for batch in batches if batch):
        assert runs is not None
    if runs is not None:
        assert [row for start, stop in runs for row in range(start, stop)] == distinct
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(runs))


def test_runs_are_few_when_they_are_long_on_average() -> None:
    rows = torch.empty((3 * RUN_BYTES, 1), dtype=torch.uint8, device="meta")
    assert are_few(((0, 1), (2, 3), (4, 5)), rows)
    assert not are_few(((0, 1), (2, 3), (4, 5), (6, 7)), rows)
    assert are_few(((0, 9),), rows[:9])
    assert not are_few(None, rows)
