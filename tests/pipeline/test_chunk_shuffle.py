"""shuffle="chunks": every row once, chunks together, mixed in groups; seeded and resumable; and the warning that names it."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import rowferry as rf
from rowferry.pipeline import _chunk_shuffle
from rowferry.pipeline._chunk_order import ChunkOrder, Groups, Mixed
from rowferry.pipeline._chunk_shuffle import chunk_rows, default_together
from rowferry.stores import ArrayStore, as_store

ROWS = 1000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """1,000 rows that hold their own number, in compressed chunks of 30, which count as large."""
    monkeypatch.setattr(_chunk_shuffle, "CHUNK_BYTES", 1)
    data = np.repeat(np.arange(ROWS, dtype="i4")[:, None], 4, axis=1)
    zarr.create_array(tmp_path / "rows.zarr", shape=data.shape, dtype="i4", chunks=(30, 4))[...] = data
    return tmp_path / "rows.zarr"


def epoch(pipe: rf.Pipeline) -> list[list[int]]:
    return [batch.data[:, 0].tolist() for batch in pipe]


def rows_of(batches: list[list[int]]) -> list[int]:
    """Sorted."""
    return sorted(itertools.chain.from_iterable(batches))


SMALL = st.integers(0, 3)


@given(n=st.integers(1, 300), chunk=st.integers(1, 40), together=st.integers(1, 9), seed=SMALL, number=SMALL)
@settings(deadline=None)
def test_an_order_has_every_row_once_and_each_chunk_in_one_group(
    n: int, chunk: int, together: int, seed: int, number: int
) -> None:
    order = ChunkOrder(n, chunk, together, seed, number)
    made = [order.group(number) for number in range(order.groups)]
    assert all(np.array_equal(group.rows, np.sort(group.rows)) for group in made)
    groups = [group.rows[group.places] for group in made]
    assert sorted(np.concatenate(groups).tolist()) == list(range(n))
    starts = np.cumsum([0, *(group.size for group in groups)])
    assert starts.tolist() == [order.start(group) for group in range(order.groups + 1)]
    assert [order.group_at(place) for place in range(n)] == np.repeat(np.arange(len(groups)), np.diff(starts)).tolist()
    whole = [np.unique(group[group < n // chunk * chunk] // chunk) for group in groups]
    assert np.concatenate(whole).size == n // chunk  # no chunk in two groups
    assert all(chunks.size <= together for chunks in whole)


@pytest.mark.parametrize("device_mover", [{}, {"mover": "copy", "lookahead": 0}, {"lookahead": 3, "depth": 3}])
def test_an_epoch_gives_every_row_once_in_batches_that_mix_a_few_chunks(path: Path, device_mover: dict[str, Any]) -> None:
    with rf.Pipeline(path, batch_size=60, shuffle="chunks", shuffle_chunks=4, device="cpu", **device_mover) as pipe:
        assert len(pipe) == 17
        first, second = epoch(pipe), epoch(pipe)
    for batches in (first, second):
        assert rows_of(batches) == list(range(ROWS))
        assert [len(batch) for batch in batches] == [60] * 16 + [40]
        touched = [len({row // 30 for row in batch}) for batch in batches]
        assert max(touched) <= 9  # two groups of four, and the rest
        assert all(batch != sorted(batch) for batch in batches)
    assert first != second


def test_the_order_stays_what_it_was() -> None:
    order = Mixed(Groups(ChunkOrder(n=20, chunk_rows=3, together=2, seed=5, epoch=1)), 0, 20)
    assert order.rows().tolist() == [19, 12, 1, 13, 18, 2, 14, 0, 15, 17, 5, 3, 16, 4, 8, 10, 9, 7, 6, 11]


def test_the_order_is_the_seeds_and_the_epochs(path: Path) -> None:
    def order(seed: int, start: int) -> list[list[int]]:
        with rf.Pipeline(path, batch_size=64, shuffle="chunks", shuffle_chunks=3, seed=seed, device="cpu") as pipe:
            pipe.set_epoch(start)
            return epoch(pipe)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)


@pytest.mark.parametrize("taken", [0, 1, 5, 15])
def test_it_resumes_at_any_batch(path: Path, taken: int) -> None:
    options: dict[str, Any] = {"batch_size": 64, "shuffle": "chunks", "shuffle_chunks": 3, "seed": 5, "device": "cpu"}
    with rf.Pipeline(path, **options) as pipe:
        whole = epoch(pipe)
        pipe.set_epoch(0)
        live = iter(pipe)
        for _ in range(taken):
            next(live)
        state = pipe.state_dict()
    with rf.Pipeline(path, **options, lookahead=2, depth=3) as again:
        again.load_state_dict(state)
        assert epoch(again) == whole[taken:]


def test_drop_last_leaves_out_the_last_rows(path: Path) -> None:
    with rf.Pipeline(path, batch_size=300, shuffle="chunks", drop_last=True, device="cpu") as pipe:
        batches = epoch(pipe)
    assert [len(batch) for batch in batches] == [300] * 3
    assert len(set(rows_of(batches))) == 900


def test_each_chunk_is_decoded_once_an_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = rf.ZarrStore(path, decoder="zarr")
    read: list[int] = []
    real = type(store._array.store).get

    async def counting(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        read.append(key.startswith("c/"))
        return await real(self, key, *args, **kwargs)

    monkeypatch.setattr(type(store._array.store), "get", counting)
    with rf.Pipeline(store, batch_size=10, shuffle="chunks", shuffle_chunks=5, lookahead=2, device="cpu") as pipe:
        assert rows_of(epoch(pipe)) == list(range(ROWS))
    assert sum(read) == 34


def test_ten_billion_rows_are_shuffled_at_once_and_in_little_memory() -> None:
    order = ChunkOrder(10**10 + 7, 1000, 64, 0, 3)
    rows = order.group(order.group_at(10**9)).rows
    assert 64_000 <= rows.size <= 64_007
    assert np.unique(rows // 1000).size in (64, 65)


def test_what_shuffle_takes_is_checked(path: Path) -> None:
    for wrong in ({"shuffle": "rows"}, {"shuffle": "chunks", "shuffle_chunks": 0}, {"shuffle": True, "shuffle_chunks": 4}):
        with pytest.raises(ValueError, match="shuffle"):
            rf.Pipeline(path, batch_size=10, **wrong)
    with pytest.raises(ValueError, match="excludes shuffle"):
        rf.Pipeline(path, batch_size=10, sampler=range(10), shuffle="chunks")
    with pytest.raises(ValueError, match="batch_size"):
        rf.Pipeline(path, shuffle="chunks")


def test_chunks_are_about_a_mebibyte_in_whole_chunks_of_the_file_and_groups_about_32(tmp_path: Path) -> None:
    plain = ArrayStore(torch.zeros(10_000, 256))
    assert chunk_rows([plain]) == 1024
    for rows_of_a_chunk, wanted in ((30, 34 * 30), (1000, 1000), (2000, 2000)):
        array = zarr.create_array(
            tmp_path / f"{rows_of_a_chunk}.zarr", shape=(9_000, 256), chunks=(rows_of_a_chunk, 256), dtype="f4"
        )
        assert chunk_rows([as_store(array)]) == wanted
    assert default_together([plain], 1024) == 32
    assert default_together([plain], 1 << 20) == 8


def test_a_plain_shuffle_that_reads_far_too_much_is_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rowferry"):
        with rf.Pipeline(path, batch_size=1, lookahead=1, shuffle=True, device="cpu"):
            pass
        assert "30 rows for a row used" in caplog.text
        assert "shuffle='chunks'" in caplog.text
        caplog.clear()
        few: dict[str, Any] = {"batch_size": 1, "lookahead": 1, "device": "cpu"}
        fine: list[dict[str, Any]] = [{"shuffle": "chunks"}, {"shuffle": False}, {"shuffle": True, "batch_size": 500}]
        for options in fine:
            with rf.Pipeline(path, **(few | options)):
                pass
        assert not caplog.text
