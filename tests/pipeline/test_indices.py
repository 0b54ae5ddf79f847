"""Every kind of index that a batch sampler may yield, and those that are refused."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline

Make = Callable[..., Pipeline]
ROWS = 8

KINDS: dict[str, tuple[Any, Any]] = {
    "list": ([3, 0, 3], [3, 0, 3]),
    "nested list": ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "tuple": ((5, 6), [5, 6]),
    "range": (range(6, 0, -2), [6, 4, 2]),
    "slice": (slice(1, 6, 2), [1, 3, 5]),
    "backward slice": (slice(None, None, -3), [7, 4, 1]),
    "array": (array.array("i", [2, 1]), [2, 1]),
    "one int": (5, 5),
    "0-d tensor": (torch.tensor(5), 5),
    "negative": ([-1, -ROWS, 0], [7, 0, 0]),
    "bool list": ([True] + [False] * 6 + [True], [0, 7]),
    "numpy bool": (np.arange(ROWS) % 3 == 0, [0, 3, 6]),
    "torch bool": (torch.arange(ROWS) > 5, [6, 7]),
    "no row of a mask": (np.zeros(ROWS, bool), []),
    "empty list": ([], []),
    "empty 2-d": (np.empty((0, 3), np.int64), np.empty((0, 3))),
    "empty 3-d": (torch.empty(2, 0, 4, dtype=torch.int32), np.empty((2, 0, 4))),
    "3-d": (np.arange(8).reshape(2, 2, 2), np.arange(8).reshape(2, 2, 2)),
    "Fortran order": (np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).reshape(2, 3)),
    "strided": (np.arange(8)[::-2], [7, 5, 3, 1]),
    "transposed tensor": (torch.arange(6).view(2, 3).T, np.arange(6).reshape(2, 3).T),
    "big endian": (np.array([1, 2], ">i4"), [1, 2]),
    **{f"numpy {name}": (np.array([7, 1], name), [7, 1]) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")},
    **{
        f"torch {dtype}": (torch.tensor([7, 1], dtype=dtype), [7, 1])
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_index_gives_its_rows_in_its_shape(pipeline: Make, numbered: Callable[..., Tensor], kind: str) -> None:
    index, wanted = KINDS[kind]
    expected = torch.from_numpy(np.asarray(wanted, np.int64))
    with pipeline(numbered(ROWS), batch_sampler=[[0], index, [1]]) as pipe:
        batch = list(pipe)[1]
    assert torch.equal(batch.index, expected)
    assert torch.equal(batch.data, numbered(ROWS)[expected])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_index_can_be_written_back(pipeline: Make, numbered: Callable[..., Tensor], kind: str) -> None:
    index, wanted = KINDS[kind]
    expected = torch.from_numpy(np.asarray(wanted, np.int64))
    values = numbered(ROWS)
    with pipeline(values, batch_sampler=[[0], index, [1]], writable=True) as pipe:
        for number, batch in enumerate(pipe):
            if number == 1:
                assert torch.equal(batch.rows, torch.from_numpy(np.unique(expected.numpy())))
                assert torch.equal(batch.rows[batch.inverse], expected)
                assert batch.inverse.shape == expected.shape
                assert torch.equal(batch.lookup(), numbered(ROWS)[expected])
                batch.write_back(batch.values + 1)
    changed = numbered(ROWS)
    changed[np.unique(expected.numpy())] += 1
    assert torch.equal(values, changed)


def test_an_epoch_of_empty_batches_has_as_many(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(ROWS), batch_sampler=[[]] * 10) as pipe:
        assert [tuple(batch.data.shape) for batch in pipe] == [(0, 3)] * 10


@pytest.mark.parametrize(
    "bad", [[0, ROWS], [-ROWS - 1], np.array([2**40]), torch.tensor([ROWS]), np.array([2**63], np.uint64)], ids=str
)
def test_a_row_out_of_range_names_row_and_batch_after_the_earlier_batches(
    pipeline: Make, numbered: Callable[..., Tensor], bad: Any
) -> None:
    with pipeline(numbered(ROWS), batch_sampler=[[1], [2], bad, [3]]) as pipe:
        batches = iter(pipe)
        assert [next(batches).index.tolist() for _ in range(2)] == [[1], [2]]
        with pytest.raises(IndexError, match="batch 2"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_a_mask_of_another_length_is_an_index_error(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    for mask in (np.ones(ROWS - 1, bool), torch.ones(ROWS, 1, dtype=torch.bool)):
        with pipeline(numbered(ROWS), batch_sampler=[mask]) as pipe, pytest.raises(IndexError, match="mask"):
            next(iter(pipe))


@pytest.mark.parametrize("bad", [[0.0], np.array([1.5]), torch.tensor([1.0]), ["1"], [None], 1.0], ids=str)
def test_an_index_that_is_no_integer_is_a_type_error(pipeline: Make, numbered: Callable[..., Tensor], bad: Any) -> None:
    with pipeline(numbered(ROWS), batch_sampler=[[1], bad]) as pipe:
        batches = iter(pipe)
        assert next(batches).index.tolist() == [1]
        with pytest.raises(TypeError, match=r"integers|row number"):
            next(batches)


def test_a_table_without_rows_refuses_any_row(pipeline: Make) -> None:
    with pipeline(torch.empty(0, 3), batch_sampler=[[], [0]]) as pipe:
        batches = iter(pipe)
        assert tuple(next(batches).data.shape) == (0, 3)
        with pytest.raises(IndexError, match="no rows"):
            next(batches)


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_an_array_that_the_sampler_changes_after_yielding_it_asks_for_what_it_held_then(
    pipeline: Make, numbered: Callable[..., Tensor], make: Callable[[Any], Any]
) -> None:
    class Reusing:
        def __iter__(self) -> Iterator[Any]:
            buffer = make([0, 0])
            for number in range(7):
                buffer[0] = number
                buffer[1] = number + 1
                yield buffer
            buffer[:] = 10**6

    with pipeline(numbered(ROWS), batch_sampler=Reusing()) as pipe:
        assert [batch.index.tolist() for batch in pipe] == [[number, number + 1] for number in range(7)]


def test_the_callers_array_is_not_changed(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    index = np.array([-1, 3, -1])
    with pipeline(numbered(ROWS), batch_sampler=[index]) as pipe:
        batch = next(iter(pipe))
        batch.index.zero_()
    assert index.tolist() == [-1, 3, -1]
