"""Errors rise in the user's next call, after the batches before them, and say what, where and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import FailingStore, OracleStore

Make = Callable[..., Pipeline]


class DiskError(OSError):
    """A kind of its own, to see that it arrives as it was raised."""


def taken_until_error(pipe: Pipeline, kind: type[BaseException]) -> tuple[list[int], BaseException]:
    """Numbers of the batches that arrive, and the error that ends them."""
    seen: list[int] = []
    with pytest.raises(kind) as caught:
        seen.extend(batch.number for batch in pipe)
    return seen, caught.value


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


# ---- while reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_batch", [0, 1, 5, 9])
def test_batches_before_a_row_that_cannot_be_read_arrive_and_then_its_error(
    windowed: Make, numbered: Callable[..., Tensor], bad_batch: int
) -> None:
    store = FailingStore(
        ArrayStore(numbered(40), name="weights"), DiskError(5, "the disk is on fire"), rows=[bad_batch * 4 + 1]
    )
    with windowed(store, batch_size=4) as pipe:
        seen, error = taken_until_error(pipe, DiskError)
    assert seen == list(range(bad_batch))
    assert error.args == (5, "the disk is on fire")
    assert "weights" in notes(error)
    assert f"batch {bad_batch}" in notes(error)
    assert "_fail_if" in "".join(traceback.format_exception(error))


def test_after_a_failed_epoch_a_new_one_works(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    store = FailingStore(ArrayStore(numbered(40)), DiskError("once"), rows=[37])
    with windowed(store, batch_size=4) as pipe:
        assert taken_until_error(pipe, DiskError)[0] == list(range(9))
        assert taken_until_error(pipe, DiskError)[0] == list(range(9))
        store.heal()
        assert [batch.number for batch in pipe] == list(range(10))


def test_a_read_that_fails_once_costs_no_more_than_its_window(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    """The batches of a failed window are fetched again one by one, so a passing fault may pass unseen."""
    store = FailingStore(ArrayStore(numbered(40)), DiskError("once"), reads=[3])
    with ahead(store, batch_size=4) as pipe:
        assert [batch.data[0, 0].item() for batch in pipe] == [400.0 * number for number in range(10)]


def test_after_an_error_the_iterator_is_over(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    store = FailingStore(ArrayStore(numbered(8)), DiskError("always"), broken=True)
    with windowed(store, batch_size=4) as pipe:
        batches = iter(pipe)
        with pytest.raises(DiskError):
            next(batches)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(batches)


def test_a_sampler_that_raises_is_heard_after_its_batches(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            yield [1]
            yield [2]
            raise ZeroDivisionError("in the sampler")

    with pipeline(numbered(4), batch_sampler=Sampler()) as pipe:
        for _ in range(2):
            seen, error = taken_until_error(pipe, ZeroDivisionError)
            assert seen == [0, 1]
            assert str(error) == "in the sampler"
            assert traceback.extract_tb(error.__traceback__)[-1].name == "__iter__"


def test_a_sampler_that_raises_at_once_is_heard_in_next(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            raise ZeroDivisionError("at once")
            yield []

    with pipeline(numbered(4), batch_sampler=Sampler()) as pipe:
        batches = iter(pipe)
        with pytest.raises(ZeroDivisionError, match="at once"):
            next(batches)


def interrupted(pipe: Pipeline) -> None:
    for batch in pipe:
        if batch.number == 2:
            raise ZeroDivisionError("mine")


def test_an_error_in_the_loop_body_leaves_the_pipeline_usable(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(20), batch_size=4) as pipe:
        with pytest.raises(ZeroDivisionError):
            interrupted(pipe)
        assert [batch.number for batch in pipe] == list(range(5))


def test_an_error_in_the_loop_body_leaves_with_as_it_is(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    pipe = pipeline(numbered(20), batch_size=4)
    with pytest.raises(ZeroDivisionError, match="mine"), pipe:
        interrupted(pipe)


# ---- what does not fit ------------------------------------------------------------------------------------------


def test_a_batch_size_that_does_not_fit_a_slot_is_refused_with_the_bytes_that_would(ahead: Make) -> None:
    values = torch.zeros(100, 256)
    with pytest.raises(ValueError, match=r"batch of 50 rows takes 51200 bytes.*staging_bytes=102400") as caught:
        ahead(values, batch_size=50, staging_bytes=60_000)
    assert "batch_size" in str(caught.value)
    with ahead(values, batch_size=50, staging_bytes=102_400) as pipe:
        assert len(list(pipe)) == 2


def test_a_sampled_batch_that_does_not_fit_names_itself_after_the_batches_before_it(windowed: Make) -> None:
    with windowed(torch.zeros(5000, 64), batch_sampler=[[1, 2], [3], list(range(5000)), [4]]) as pipe:
        seen, error = taken_until_error(pipe, ValueError)
    assert seen == [0, 1]
    assert "batch 2" in str(error)
    assert "1280000 bytes" in str(error)
    assert "staging_bytes=" in str(error)


def test_the_advice_about_staging_bytes_holds(ahead: Make) -> None:
    batches = [list(range(k, k + 50)) for k in (0, 50)]
    for writable in (False, True):
        with ahead(torch.zeros(100, 256), batch_sampler=batches, staging_bytes=4096, writable=writable) as pipe:
            _, error = taken_until_error(pipe, ValueError)
        advised = int(str(error).split("staging_bytes=")[1].split()[0])
        with ahead(torch.zeros(100, 256), batch_sampler=batches, staging_bytes=advised, writable=writable) as pipe:
            assert len(list(pipe)) == 2


def test_repeats_of_a_row_take_no_room(ahead: Make) -> None:
    with ahead(torch.zeros(100, 256), batch_sampler=[[7] * 5000], staging_bytes=4096) as pipe:
        assert next(iter(pipe)).data.shape == (5000, 256)


# ---- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "error", "said"),
    [
        ({"batch_size": None}, ValueError, "batch_size"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 2.0}, ValueError, "batch_size"),
        ({"batch_size": True}, ValueError, "batch_size"),
        ({"batch_sampler": [[0]]}, ValueError, "batch_sampler"),
        ({"batch_size": None, "batch_sampler": 5}, TypeError, "iterable"),
        ({"sampler": [0], "shuffle": True}, ValueError, "shuffle"),
        ({"lookahead": -1}, ValueError, "lookahead"),
        ({"lookahead": 1.5}, TypeError, "lookahead"),
        ({"lookahead": "all"}, TypeError, "lookahead"),
        ({"lookahead": True}, TypeError, "lookahead"),
        ({"depth": 0}, ValueError, "depth"),
        ({"depth": 2.0}, TypeError, "depth"),
        ({"staging_bytes": 0}, ValueError, "staging_bytes"),
        ({"staging_bytes": -5}, ValueError, "staging_bytes"),
        ({"staging_bytes": 1e9}, ValueError, "staging_bytes"),
        ({"staging_bytes": 1}, ValueError, "staging_bytes"),
        ({"threads": 0}, ValueError, "threads"),
        ({"threads": 1.5}, ValueError, "threads"),
        ({"mover": "teleport"}, ValueError, "'copy'"),
        ({"mover": "zero-copy"}, ValueError, "PinnedStore"),
        ({"fetch": False}, ValueError, "writable"),
        ({"seed": 1.5}, TypeError, "integer"),
        ({"device": "no such device"}, (RuntimeError, ValueError), "device"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    ahead: Make, keywords: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ahead(torch.zeros(4, 2), **{"batch_size": 2, **keywords})


def test_local_rows_are_refused_for_a_store_that_is_not_in_memory(ahead: Make) -> None:
    with pytest.raises(ValueError, match="local"):
        ahead(OracleStore(torch.zeros(4, 2)), batch_size=2, mover="local")
