"""Movers on a real GPU: measured and chosen, plain copies of rows in order, files read where they lie in the page cache."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.pipeline._trial import SETTLE
from rowferry.pipeline.testing._judges import Changing, set_movers
from rowferry.stores import _page_cache
from rowferry.stores._casts import cast
from rowferry.stores._kernels import RowKernels

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 200_000, 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A .npy file of 51 MB that was just written, so it is in the page cache."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32))
    return tmp_path / "rows.npy"


def batches(count: int, size: int = 4_096) -> Iterator[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return (rng.integers(0, ROWS, size) for _ in range(count))


def require_rows(pipe: rf.Pipeline, table: torch.Tensor) -> int:
    """Every batch holds the rows that it asked for; how many windows there were."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    resident = table.cuda()
    for batch in pipe:
        wrong += (batch.data != resident[batch.index]).any()
    assert int(wrong) == 0
    return pipe.stats().windows


@pytest.mark.parametrize(
    ("settings", "gathers", "scatters"),
    [({}, {4}, set()), ({"writable": True}, {12}, {8}), ({"writable": True, "fetch": False}, set(), {8})],
)
def test_directions_that_share_the_link_share_its_blocks(
    settings: dict[str, Any], gathers: set[int], scatters: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[str, set[int]] = {"gather": set(), "scatter": set()}
    plain = RowKernels._launch

    def launch(self: RowKernels, kind: str, *given: Any) -> None:
        launched[kind].add(given[-1])
        plain(self, kind, *given)

    monkeypatch.setattr(RowKernels, "_launch", launch)
    store = rf.PinnedStore.zeros((ROWS, WIDTH), torch.float32)
    with rf.Pipeline(store, batch_sampler=list(batches(6)), mover="zero-copy", device="cuda", **settings) as pipe:
        for batch in pipe:
            if settings:
                batch.write_back(torch.ones_like(batch.values))
    assert launched == {"gather": gathers, "scatter": scatters}


def test_the_choice_over_a_pinned_store_is_measured_and_told(caplog: pytest.LogCaptureFixture) -> None:
    table = torch.randn(ROWS, WIDTH)
    store = rf.PinnedStore.from_array(table)
    with (
        caplog.at_level(logging.INFO, "rowferry"),
        rf.Pipeline(store, batch_sampler=list(batches(120)), lookahead=4, staging_bytes=32 << 20, device="cuda") as pipe,
    ):
        assert require_rows(pipe, table) >= SETTLE
        why = pipe.stats().mover_why
    assert "GB/s against" in why
    assert f"reading {store.name} by {why}" in [record.message for record in caplog.records]


def test_the_choice_of_writing_is_measured_too() -> None:
    store = rf.PinnedStore.zeros((ROWS, WIDTH), torch.float32)
    wanted = torch.zeros(ROWS)
    with rf.Pipeline(
        store, batch_sampler=list(batches(160)), lookahead=4, staging_bytes=64 << 20, writable=True, device="cuda"
    ) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
        pipe.flush()
        why = pipe.stats().mover_why
    for index in batches(160):
        wanted[np.unique(index)] += 1
    assert torch.equal(store.torch(), wanted[:, None].expand(-1, WIDTH))
    assert "; writing: " in why
    assert why.count("GB/s against") == 2


@pytest.mark.parametrize("mover", ["auto", "copy", "zero-copy"])
def test_rows_in_order_are_exact_in_both_directions(mover: Any) -> None:
    table = torch.randn(ROWS, WIDTH)
    source, sink = rf.PinnedStore.from_array(table), rf.PinnedStore.zeros((ROWS, WIDTH), torch.float32)
    with (
        rf.Pipeline(source, batch_size=3_000, mover=mover, device="cuda") as reading,
        rf.Pipeline(sink, batch_size=3_000, mover=mover, writable=True, fetch=False, device="cuda") as writing,
    ):
        for given, taken in zip(reading, writing, strict=True):
            taken.write_back(given.data)
        writing.flush()
    assert torch.equal(sink.torch(), table)


def test_rows_cast_by_host_threads_and_by_the_device_have_the_same_bits() -> None:
    table = torch.randn(ROWS, WIDTH) * 1e4
    store = rf.PinnedStore.from_array(table)
    wanted = cast(table, torch.float16).cuda()
    with rf.Pipeline(
        store, batch_sampler=list(batches(80)), dtype=torch.float16, lookahead=4, depth=3, staging_bytes=48 << 20, device="cuda"
    ) as pipe:
        (judge,) = set_movers(pipe, "changing", 0)
        for batch in pipe:
            assert torch.equal(batch.data, wanted[batch.index])
    assert isinstance(judge, Changing)
    assert set(judge.turns) == {0, 1, 2}


def test_a_file_in_the_page_cache_is_read_where_it_lies(path: Path) -> None:
    table = torch.from_numpy(np.load(path))
    with (
        rf.Pipeline(path, batch_sampler=list(batches(120)), lookahead=4, staging_bytes=32 << 20, device="cuda") as pipe,
        rf.Pipeline(path, batch_sampler=list(batches(4)), device="cuda") as other,
    ):
        require_rows(pipe, table)
        require_rows(other, table)
        assert "zero-copy" in pipe.stats().mover_why
        assert len(_page_cache._locked) == 1
    del pipe, other
    gc.collect()
    assert len(_page_cache._locked) == 0
    assert torch.equal(torch.from_numpy(np.load(path)), table)


def test_a_file_is_read_by_zero_copy_alone_when_that_is_asked_for(path: Path) -> None:
    table = torch.from_numpy(np.load(path))
    with rf.Pipeline(path, batch_size=1_000, shuffle=True, mover="zero-copy", device="cuda") as pipe:
        require_rows(pipe, table)
        assert pipe.stats().mover == "zero-copy"
        assert pipe.stats().bytes_pinned < 32 << 20


def test_a_file_that_does_not_fit_goes_by_copy_and_the_reason_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_page_cache, "SHARE", 0.0)
    table = torch.from_numpy(np.load(path))
    with caplog.at_level(logging.INFO, "rowferry"), rf.Pipeline(path, batch_size=1_000, device="cuda") as pipe:
        require_rows(pipe, table)
        require_rows(pipe, table)
        stats = pipe.stats()
    assert stats.mover == "copy"
    assert "not where it lies in the page cache: its 51,200,128 bytes are more than 0% of the" in stats.mover_why
    assert sum("is read by copy, not where it lies" in record.message for record in caplog.records) == 1


def test_a_file_that_was_cold_is_locked_at_the_next_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page_cache, "SMALL", 0)
    monkeypatch.setattr(_page_cache.PageCache, "resident", lambda self: 0.1)
    table = torch.from_numpy(np.load(path))
    with rf.Pipeline(path, batch_size=1_000, shuffle=True, device="cuda") as pipe:
        require_rows(pipe, table)
        assert pipe.stats().mover == "copy"
        monkeypatch.setattr(_page_cache.PageCache, "resident", lambda self: 1.0)
        require_rows(pipe, table)
        assert "zero-copy" in pipe.stats().mover_why
