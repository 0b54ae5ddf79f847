"""What happens to rows that a store would not take."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import FailingStore, SlowStore

Make = Callable[..., Pipeline]


class DiskError(OSError):
    """A kind of its own, to see that it arrives as it was raised."""


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


# ---- drains that fail -------------------------------------------------------------------------------------------


def test_a_failed_drain_rises_in_flush_and_the_next_flush_tries_again(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(8)
    store = FailingStore(ArrayStore(memory, name="weights"), DiskError("full"), broken=True)
    with windowed(store, batch_size=4, writable=True, fetch=False) as pipe:
        batches = iter(pipe)
        next(batches).write_back(torch.zeros(4, 3))
        for _ in range(2):
            with pytest.raises(DiskError, match="full") as caught:
                pipe.flush()
            assert "weights" in notes(caught.value)
        with pytest.raises(RuntimeError, match="flush"):
            pipe.state_dict()
        store.heal()
        pipe.flush()
        assert memory[:4].count_nonzero() == 0
        assert pipe.state_dict()["position"] == 1
        assert next(batches).number == 1


def test_a_failed_drain_rises_in_next_and_the_next_call_goes_on(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(40)
    store = FailingStore(ArrayStore(memory), DiskError("full"), writes=[2])
    errors, seen = 0, []
    with windowed(store, batch_size=4, writable=True) as pipe:
        batches = iter(pipe)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except DiskError:
                errors += 1
                continue
            seen.append(batch.number)
            batch.write_back(batch.values + 1)
        pipe.flush()
    assert seen == list(range(10))
    assert errors <= 1  # none where the last window's drain is tried again by the end itself
    assert torch.equal(memory, numbered(40) + 1)


def test_close_tries_once_more_and_that_may_be_enough(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(8)
    store = FailingStore(ArrayStore(memory), DiskError("full"), writes=[1])
    pipe = windowed(store, batch_size=4, writable=True)
    batches = iter(pipe)
    batch = next(batches)
    batch.write_back(batch.values + 1)
    pipe.close()
    assert store.write_count == 2
    assert torch.equal(memory[:4], numbered(8)[:4] + 1)


def test_close_raises_with_the_number_of_rows_lost(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    store = FailingStore(ArrayStore(numbered(8)), DiskError("full"), writes=range(1, 100))
    pipe = windowed(store, batch_sampler=[[0, 1, 2], [2, 3, 4]], writable=True)
    batches = iter(pipe)
    batch = next(batches)
    batch.write_back(batch.values + 1)
    with pytest.raises(DiskError, match="full") as caught:
        pipe.close()
    assert "3 changed rows are lost" in notes(caught.value)
    pipe.close()


def test_rows_kept_for_the_next_window_are_lost_rows_too(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    store = FailingStore(ArrayStore(numbered(8)), DiskError("full"), writes=range(1, 100))
    pipe = ahead(store, batch_sampler=[[0, 1, 2], [2, 3, 4], [5], [6]], writable=True)
    batches = iter(pipe)
    batch = next(batches)
    batch.write_back(batch.values + 1)
    assert pipe._live is not None
    live = pipe._live()
    assert live is not None
    run = live._server.run  # type: ignore[union-attr]
    run.host.wait(lambda: 1 in run.windows, 5)  # the next window is planned, and will carry row 2
    with pytest.raises(DiskError) as caught:
        pipe.close()
    assert "3 changed rows are lost" in notes(caught.value)


def test_after_rows_were_lost_the_store_can_be_written_by_another_pipeline(
    windowed: Make, numbered: Callable[..., Tensor]
) -> None:
    store = FailingStore(ArrayStore(numbered(8)), DiskError("full"), broken=True)
    pipe = windowed(store, batch_size=4, writable=True, fetch=False)
    batches = iter(pipe)
    next(batches).write_back(torch.zeros(4, 3))
    with pytest.raises(DiskError):
        pipe.close()
    store.heal()
    with windowed(store, batch_size=4, writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)


def test_an_error_of_the_loop_body_is_not_hidden_by_a_failed_drain(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    store = FailingStore(ArrayStore(numbered(8)), DiskError("full"), broken=True)

    def train() -> None:
        with ahead(store, batch_size=4, writable=True, fetch=False) as pipe:
            for batch in pipe:
                batch.write_back(torch.zeros(4, 3))
                raise ZeroDivisionError("mine")

    with pytest.raises((ZeroDivisionError, DiskError)) as caught:
        train()
    assert isinstance(caught.value, ZeroDivisionError) or isinstance(caught.value.__context__, ZeroDivisionError)


def test_a_dropped_iterator_that_loses_rows_logs_how_many(
    ahead: Make, numbered: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    store = FailingStore(ArrayStore(numbered(8)), DiskError("full"), broken=True)
    pipe = ahead(store, batch_size=4, writable=True, fetch=False)
    batches = iter(pipe)
    next(batches).write_back(torch.zeros(4, 3))
    with caplog.at_level(logging.ERROR, "rowferry"):
        del batches
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "4 changed rows" in caplog.text
    store.heal()
    pipe.close()


# ---- drains that hang -------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(numbered: Callable[..., Tensor]) -> Iterator[SlowStore]:
    """A store whose writes do not return before the test is over."""
    store = SlowStore(ArrayStore(numbered(40)))
    store.writes.clear()
    yield store
    store.writes.set()


def test_close_with_a_timeout_raises_with_the_number_of_rows_that_did_not_land(ahead: Make, stuck: SlowStore) -> None:
    pipe = ahead(stuck, batch_size=4, writable=True)
    batches = iter(pipe)
    batch = next(batches)
    batch.write_back()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="4 changed rows"):
        pipe.close(timeout=0.2)
    assert time.monotonic() - begun < 5


def test_reading_goes_on_while_a_drain_hangs_until_its_slot_is_needed(ahead: Make, stuck: SlowStore) -> None:
    with ahead(stuck, batch_size=4, writable=True, depth=4, lookahead=1) as pipe:
        batches = iter(pipe)
        next(batches).write_back()
        seen = [next(batches).number for _ in range(3)]
        was_stuck = stuck.blocked.wait(5)
        stuck.writes.set()  # before anything can fail: leaving the block waits for the drain
        assert was_stuck
        assert seen == [1, 2, 3]


def test_flush_waits_for_writes_to_land(ahead: Make, stuck: SlowStore) -> None:
    with ahead(stuck, batch_size=4, writable=True) as pipe:
        batches = iter(pipe)
        next(batches).write_back(torch.full((4, 3), 7.0))

        def open_the_gate() -> None:
            stuck.blocked.wait(5)
            stuck.writes.set()

        opener = threading.Thread(target=open_the_gate)
        opener.start()
        pipe.flush()
        opener.join()
        assert stuck.inner.gather([0, 1, 2, 3]).eq(7).all()


def test_closing_lands_what_was_written_though_a_read_never_returns(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(40)
    store = SlowStore(ArrayStore(memory))
    pipe = ahead(store, batch_size=4, writable=True, lookahead=1)
    batches = iter(pipe)
    batch = next(batches)
    store.reads.clear()
    try:
        while not store.blocked.wait(0.05):  # the producer reads ahead until it is stuck
            batch.write_back(batch.values + 1)
            batch = next(batches)
        batch.write_back(batch.values + 1)
        begun = time.monotonic()
        pipe.close()
        assert time.monotonic() - begun < 5
        assert torch.equal(memory[: 4 * batch.number + 4], numbered(40)[: 4 * batch.number + 4] + 1)
    finally:
        store.reads.set()
