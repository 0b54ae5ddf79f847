"""Row numbers: checked, made distinct, split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.stores._rows import as_slice, check_index, contiguous, distinct_places, last_of_each, pieces, split_sorted

RAGGED_ROWS = st.lists(st.integers(-20, 19), max_size=12)


class OnTheGpu:
    """What a CuPy array shows of itself."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012 (as CuPy has it)

    def get(self) -> list[int]:
        return [2, 0]


@settings(max_examples=60, deadline=None)
@given(RAGGED_ROWS)
def test_a_checked_index_is_what_numpy_would_take(index: list[int]) -> None:
    rows, shape = check_index(index, 20, "t")
    assert shape == (len(index),)
    assert rows.dtype == np.int64
    assert rows.tolist() == [range(20)[row] for row in index]


@pytest.mark.parametrize("index", [np.arange(6)[::2], np.arange(4, dtype=">i2"), torch.arange(3), [1], range(3), slice(2, 9)])
def test_a_checked_index_is_contiguous_native_int64(index: Any) -> None:
    rows, _ = check_index(index, 20, "t")
    assert rows.dtype == np.dtype(np.int64)
    assert rows.flags.c_contiguous
    assert rows.dtype.isnative


def test_an_index_of_the_right_type_is_not_copied() -> None:
    index = np.array([3, 1])
    assert np.shares_memory(check_index(index, 5, "t")[0], index)
    assert np.shares_memory(check_index(torch.from_numpy(index), 5, "t")[0], index)


def test_an_index_is_not_written_when_negatives_are_resolved() -> None:
    index = np.array([-1, 1])
    index.flags.writeable = False
    assert check_index(index, 5, "t")[0].tolist() == [4, 1]


def test_an_array_of_the_gpu_is_brought_to_the_host() -> None:
    assert check_index(OnTheGpu(), 5, "t")[0].tolist() == [2, 0]


def test_the_largest_tables_have_all_their_rows() -> None:
    n = 2**40
    assert check_index([n - 1, -n], n, "t")[0].tolist() == [n - 1, 0]
    with pytest.raises(IndexError, match=f"row {n} is out of range for t with {n} rows"):
        check_index([n], n, "t")


def test_negative_numbers_can_be_refused() -> None:
    with pytest.raises(IndexError, match=r"row -1 .*allowed: 0 to 4"):
        check_index([0, -1], 5, "t", negative=False)
    assert check_index([0, 4], 5, "t", negative=False)[0].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ([0.5], TypeError),
        (torch.tensor([0], dtype=torch.bfloat16), TypeError),
        (np.array([1 + 1j]), TypeError),
        (["1"], TypeError),
        (None, TypeError),
        (True, TypeError),
        (np.array([2**63], np.uint64), IndexError),
        ([5], IndexError),
        ([-6], IndexError),
        ([True], IndexError),
        (np.array(True), IndexError),
    ],
    ids=str,
)
def test_what_names_no_rows_is_refused_by_the_tables_name(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"t\b|bool"):
        check_index(index, 5, "t")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=15))
def test_the_last_of_each_row_is_kept(rows: list[int]) -> None:
    keep = last_of_each(np.array(rows, np.int64))
    wanted = sorted({row: place for place, row in enumerate(rows)}.values())
    assert (list(range(len(rows))) if keep is None else keep.tolist()) == wanted
    assert (keep is None) == (len(set(rows)) == len(rows))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(0, 64), st.integers(1, 2000), st.integers(1, 7))
def test_pieces_cover_all_rows_in_whole_chunks(n: int, row_nbytes: int, limit: int, chunk_rows: int) -> None:
    spans = list(pieces(n, row_nbytes, limit, chunk_rows))
    assert [row for a, b in spans for row in range(a, b)] == list(range(n))
    for a, b in spans:
        assert a % chunk_rows == 0
        assert (b - a) * row_nbytes <= limit or b - a <= chunk_rows


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 100), max_size=40), st.integers(1, 9), st.integers(1, 8))
def test_a_sorted_request_is_cut_between_chunks(chosen: set[int], most: int, chunk_rows: int) -> None:
    rows = np.array(sorted(chosen), np.int64)
    spans = list(split_sorted(rows, most, chunk_rows))
    assert [place for a, b in spans for place in range(a, b)] == list(range(len(rows)))
    assert all(b - a <= most for a, b in spans)
    chunks = rows // chunk_rows
    for _, b in spans[:-1]:
        inside = chunks[b - 1] == chunks[b]
        assert not inside or np.count_nonzero(chunks == chunks[b]) > most


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.randoms())
def test_a_run_of_rows_is_a_slice_and_nothing_else_is(start: int, length: int, random: Any) -> None:
    run = list(range(start, start + length))
    assert as_slice(np.array(run)) == slice(start, start + length)
    mixed = random.sample(run, length)
    assert as_slice(np.array(mixed)) == (slice(start, start + length) if mixed == run else None)
    assert as_slice(np.array([*run, run[-1] + 2])) is None


def test_no_rows_are_no_slice_and_no_range() -> None:
    none = np.empty(0, np.int64)
    assert as_slice(none) is None
    assert not contiguous(none)
    assert contiguous(np.array([4, 5]))
    assert not contiguous(np.array([4, 6]))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("n", [3, 100, 200, 40_000, 2**31 + 5])
def test_negative_rows_of_any_width_count_from_the_end(dtype: type[np.signedinteger[Any]], n: int) -> None:
    rows, shape = check_index(np.array([-1, 0, 2, -3], dtype), n, "x")
    assert rows.tolist() == [n - 1, 0, 2, n - 3]
    assert shape == (4,)
    with pytest.raises(IndexError):
        check_index(np.array([0, -1], dtype), n, "x", negative=False)


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([1, 1000]))
def test_distinct_places_are_those_sorted_close_together_or_far_apart(places: list[int], far: int) -> None:
    given_places = np.array(places, np.int64) * far
    distinct, which = distinct_places(given_places)
    assert distinct.tolist() == sorted(set(given_places.tolist()))
    assert distinct[which].tolist() == given_places.tolist()
