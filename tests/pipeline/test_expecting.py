"""A store is told which rows come next where the order is known, and never what is not asked for afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import rowferry as rf
from rowferry.pipeline import _chunk_order, _chunk_shuffle, _copy
from rowferry.pipeline._chunk_order import ChunkOrder, Groups, Mixed

N, CHUNK, BATCH = 240, 8, 12
ROW_NBYTES = 3 * 4


class Told:
    """What the store was told of, and then asked for; each the rows of one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expected: list[NDArray[np.int64]] = []
        self.gathered: list[NDArray[np.int64]] = []
        self.calls: list[str] = []
        gather = rf.ZarrStore._gather

        def watched(store: rf.ZarrStore, rows: NDArray[np.int64], out: Any) -> None:
            self.gathered.append(rows.copy())
            self.calls.append("gather")
            gather(store, rows, out)

        def expect(store: rf.ZarrStore, rows: NDArray[np.int64]) -> None:
            del store
            self.expected.append(rows.copy())
            self.calls.append("expect")

        monkeypatch.setattr(rf.ZarrStore, "_gather", watched)
        monkeypatch.setattr(rf.ZarrStore, "expect", expect)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(_chunk_shuffle, "CHUNK_BYTES", 1)
    return Told(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    data = np.arange(N * 3, dtype="f4").reshape(N, 3)
    zarr.create_array(tmp_path / "a.zarr", shape=data.shape, dtype="f4", chunks=(CHUNK, 3), compressors=None)[...] = data
    return tmp_path / "a.zarr"


def epoch(path: Path, **options: Any) -> None:
    with rf.Pipeline(path, device="cpu", threads=1, lookahead=2, **options) as pipe:
        for batch in pipe:
            assert np.array_equal(batch.data[:, 0].numpy(), batch.index.numpy() * 3)


@pytest.mark.parametrize("shuffle", [False, "chunks"])
def test_the_rows_of_the_next_window_are_told_while_this_one_is_fetched(path: Path, told: Told, shuffle: Any) -> None:
    epoch(path, batch_size=BATCH, shuffle=shuffle, **({"shuffle_chunks": 3} if shuffle else {}))
    assert told.calls[:4] == ["expect", "gather", "expect", "gather"]
    order, next_expected = np.concatenate(told.gathered), 0
    assert sorted(order.tolist()) == list(range(N))
    for number, rows in enumerate(told.gathered):
        next_expected += len(rows)
        if number < len(told.expected):
            expected = told.expected[number]
            assert len(expected)
            assert np.array_equal(expected, order[next_expected : next_expected + len(expected)])
    assert len(told.expected) >= len(told.gathered) - 1


def test_no_more_is_told_than_a_store_should_fetch_ahead(path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copy, "AHEAD_BYTES", 5 * ROW_NBYTES)
    epoch(path, batch_size=BATCH, shuffle=False)
    assert {len(rows) for rows in told.expected} == {5}


@pytest.mark.parametrize(("starts", "told_of"), [([60, 0, 120, 36], []), ([0, 24, 96, 180], [list(range(12, 24))])])
def test_windows_that_do_not_follow_each_other_tell_nothing(
    path: Path, told: Told, starts: list[int], told_of: list[list[int]]
) -> None:
    """A sampler of blocks: what follows a block is not what comes next; only the first row of all looks like an order."""
    blocks = [np.arange(start, start + BATCH) for start in starts]
    with rf.Pipeline(path, device="cpu", threads=1, lookahead=0, batch_sampler=blocks) as pipe:
        assert [batch.index.tolist() for batch in pipe] == [block.tolist() for block in blocks]
    assert [rows.tolist() for rows in told.expected] == told_of


def test_random_rows_tell_nothing(path: Path, told: Told) -> None:
    epoch(path, batch_size=BATCH, shuffle=True)
    assert told.gathered
    assert not told.expected


@given(
    n=st.integers(1, 300),
    chunk=st.integers(1, 20),
    together=st.integers(1, 5),
    ends=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    most=st.integers(1, 100),
)
@settings(deadline=None)
def test_places_after_some_are_those_of_the_order(n: int, chunk: int, together: int, ends: tuple[int, int], most: int) -> None:
    start, stop = sorted(min(end, n) for end in ends)
    order = ChunkOrder(n, chunk, together, seed=3, epoch=1)
    some = Mixed(Groups(order), start, stop)
    after = some.after(most)
    assert after.start == stop
    assert len(after) <= min(len(some), most, n - stop)
    assert np.array_equal(after.rows(), Mixed(Groups(order), 0, n).rows()[stop : after.stop])
    if len(after) < min(len(some), most, n - stop):  # of a few groups only
        assert order.group_at(after.stop) - order.group_at(stop) == _chunk_order._AHEAD
