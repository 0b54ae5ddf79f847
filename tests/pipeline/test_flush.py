"""When written rows are in their store: at a flush, and at every ending; and stores filled without being read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import OracleStore

Make = Callable[..., Pipeline]


# ---- flush ------------------------------------------------------------------------------------------------------


def test_when_flush_returns_every_row_written_is_in_its_store(pipeline: Make) -> None:
    memory = torch.zeros(6, 1)
    with pipeline(memory, batch_sampler=[[0, 1], [1, 2], [5], [1]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
            pipe.flush()
            written = torch.zeros(6, 1)
            for index in [[0, 1], [1, 2], [5], [1]][: batch.number + 1]:
                written[index] += 1
            assert torch.equal(memory, written)


def test_flush_before_and_after_an_epoch_is_fine(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(4), batch_size=2, writable=True) as pipe:
        pipe.flush()
        list(pipe)
        pipe.flush(sync=True)


def test_flush_does_not_end_the_window(ahead: Make) -> None:
    """A batch that was flushed may be written again, and its window goes on."""
    memory = torch.zeros(4, 1)
    with ahead(memory, batch_sampler=[[0], [1], [2], [0, 1, 2, 3]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
            pipe.flush()
            batch.write_back(batch.values + 2)
    assert memory.view(-1).tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize("ending", ["end", "break", "close", "with", "iter", "error", "del"])
def test_every_ending_drains_first(windowed: Make, ending: str) -> None:
    values = torch.zeros(12, 1)
    store = OracleStore(values)
    pipe = windowed(store, batch_size=2, writable=True)
    batches: Any = iter(pipe)
    for _ in range(6 if ending == "end" else 3):
        batch = next(batches)
        batch.write_back(batch.values + 1)
    taken = 12 if ending == "end" else 6
    if ending == "end":
        assert next(batches, None) is None
    elif ending == "close":
        pipe.close()
    elif ending == "with":
        with pipe:
            pass
    elif ending == "iter":
        iter(pipe)
    elif ending == "error":
        with pytest.raises(ZeroDivisionError), pipe:
            raise ZeroDivisionError
    elif ending == "del":
        del batches, batch
    if ending == "break":
        for batch in pipe:
            batch.write_back(batch.values)
            break
    assert store.values.view(-1).tolist() == [1] * taken + [0] * (12 - taken)
    pipe.close()


def test_without_lookahead_rows_have_landed_when_the_next_call_returns(numbered: Callable[..., Tensor]) -> None:
    memory = torch.zeros(6, 1)
    with Pipeline(ArrayStore(memory), batch_size=2, device="cpu", mover="copy", lookahead=0, writable=True) as pipe:
        for batch in pipe:
            assert memory.sum() == 2 * batch.number
            batch.write_back(batch.values + 1)
    assert memory.sum() == 6


# ---- fetch=False ------------------------------------------------------------------------------------------------


def test_a_store_is_filled_without_being_read(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    store = OracleStore(torch.zeros(20, 3))
    with windowed(store, batch_size=3, shuffle=True, writable=True, fetch=False) as pipe:
        for batch in pipe:
            assert batch.values.shape == (len(batch.rows), 3)
            batch.write_back(numbered(20)[batch.rows])
        assert pipe.stats().rows_fetched == 0
    assert torch.equal(store.values, numbered(20))


def test_there_rows_that_are_not_passed_stay_as_they_are(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(12)
    with pipeline(memory, batch_size=3, writable=True, fetch=False) as pipe:
        for batch in pipe:
            if batch.number % 2:
                batch.write_back(torch.full((3, 3), -1.0))
    assert memory[:, 0].tolist() == [0, 100, 200, -1, -1, -1, 600, 700, 800, -1, -1, -1]


def test_there_the_same_rows_again_keep_what_was_passed_last(pipeline: Make) -> None:
    memory = torch.zeros(4, 1)
    with pipeline(memory, batch_sampler=[[0, 1], [1, 2], [3], [1]], writable=True, fetch=False) as pipe:
        for batch in pipe:
            if batch.number != 3:
                batch.write_back(torch.full((len(batch.rows), 1), batch.number + 1.0))
    assert memory.view(-1).tolist() == [1, 2, 2, 3]
