"""Chunk shuffles on the CPU: groups are read once, rows mixed from them in the order asked for, and an error is its batch's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec

import rowferry as rf
from rowferry.pipeline import _chunk_shuffle, _mixing
from rowferry.pipeline._chunk_order import ChunkOrder, Groups, Mixed
from rowferry.stores._zarr_decoded import DecodedReader

KINDS = ("raw", "zstd", "zarr's zstd", "fortran", "npy", "memory", "forced")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size count as large."""
    monkeypatch.setattr(_chunk_shuffle, "CHUNK_BYTES", 1)


def open_as(kind: str, data: NDArray[Any], chunk: int, folder: Path) -> Any:
    """A store of ``data``, or what a pipeline takes for one."""
    if kind in ("memory", "forced"):
        return rf.ArrayStore(torch.from_numpy(data))
    if kind == "npy":
        np.save(folder / "rows.npy", data)
        return folder / "rows.npy"
    options: dict[str, Any] = {"compressors": ZstdCodec() if "zstd" in kind else None}
    if kind == "fortran":
        options = {"zarr_format": 2, "order": "F", "compressors": None}
    path = folder / f"{kind}.zarr"
    zarr.create_array(path, shape=data.shape, dtype=data.dtype, chunks=(chunk, data.shape[1]), **options)[...] = data
    return rf.ZarrStore(path, decoder="zarr" if kind == "zarr's zstd" else "auto")


def order_of(n: int, chunk: int, together: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return Mixed(Groups(ChunkOrder(n, chunk, together, seed, epoch)), 0, n).rows()


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True),
    n=st.integers(1, 200),
    chunk=st.integers(1, 40),
    together=st.integers(1, 9),
    batch=st.integers(1, 70),
    lookahead=st.integers(0, 5),
    depth=st.integers(1, 3),
    most=st.sampled_from([0, 1000, 1 << 20]),
    skip=st.integers(0, 3),
    cast=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_batches_are_those_of_the_plain_loop(
    kinds: list[str],
    n: int,
    chunk: int,
    together: int,
    batch: int,
    lookahead: int,
    depth: int,
    most: int,
    skip: int,
    cast: bool,
) -> None:
    folder = Path(tempfile.mkdtemp())
    tables = [np.random.default_rng(number).standard_normal((n, 3 + number)).astype("f4") for number in range(len(kinds))]
    sources = [open_as(kind, data, chunk, folder) for kind, data in zip(kinds, tables, strict=True)]
    options: dict[str, Any] = {"mover": "copy"} if "forced" in kinds else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_mixing, "MOST_BYTES", most)
        with rf.Pipeline(
            tuple(sources), batch_size=batch, shuffle="chunks", shuffle_chunks=together, seed=3, device="cpu",
            lookahead=lookahead, depth=depth, dtype=torch.float64 if cast else None, **options,
        ) as pipe:  # fmt: skip
            rows_of_a_chunk = pipe._batches.chunk_rows  # type: ignore[attr-defined]  # a chunk shuffle
            for epoch in range(2):
                order = order_of(n, rows_of_a_chunk, together, 3, epoch)
                batches = list(pipe)
                assert len(batches) == -(-n // batch)
                for number, found in enumerate(batches):
                    rows = order[number * batch : (number + 1) * batch]
                    assert found.index.tolist() == rows.tolist()
                    for column, data in zip(found.data, tables, strict=True):
                        assert torch.equal(column, torch.from_numpy(data[rows]).to(column.dtype))
                        assert column.dtype == (torch.float64 if cast else torch.float32)
            pipe.set_epoch(1)
            live = iter(pipe)
            for _ in range(min(skip, len(batches))):
                next(live)
            state = pipe.state_dict()
            pipe.load_state_dict(state)
            left = [found.index.tolist() for found in pipe]
            assert left == [found.index.tolist() for found in batches[min(skip, len(batches)) :]] or skip >= len(batches)
    shutil.rmtree(folder)


def test_a_batch_that_is_changed_or_kept_is_nobody_elses(tmp_path: Path) -> None:
    data = np.repeat(np.arange(300, dtype="f4")[:, None], 4, axis=1)
    for kind in KINDS:
        kept = []
        with rf.Pipeline(
            open_as(kind, data, 10, tmp_path), batch_size=32, shuffle="chunks", shuffle_chunks=3, device="cpu", mover="copy"
        ) as pipe:
            for batch in pipe:
                assert torch.equal(batch.data[:, 0].long(), batch.index)
                batch.data += 1
                kept.append(batch)
        for batch in kept:
            assert torch.equal(batch.data[:, 3].long(), batch.index + 1)


def counting(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.int64]]:
    """The rows of each call of a method of ``owner``, ``(rows, target)``, as they come."""
    calls: list[NDArray[np.int64]] = []
    real: Callable[..., None] = getattr(owner, name)

    def counted(*args: Any) -> None:
        calls.append(args[-2].copy())
        real(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("batch", [7, 32, 90, 1000])
@pytest.mark.parametrize("decoder", ["auto", "zarr"])
def test_each_chunk_is_decoded_once_wherever_windows_and_batches_end(
    batch: int, decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.repeat(np.arange(1000, dtype="i4")[:, None], 4, axis=1)
    open_as("zstd", data, 30, tmp_path)
    store = rf.ZarrStore(tmp_path / "zstd.zarr", decoder=decoder, cache_bytes=0)
    decoded = counting(DecodedReader, "_decode", monkeypatch)
    with rf.Pipeline(store, batch_size=batch, shuffle="chunks", shuffle_chunks=4, device="cpu") as pipe:
        assert sum(len(batch.data) for batch in pipe) == 1000
    assert np.sort(np.concatenate(decoded)).tolist() == list(range(1000))
    assert all(bool(np.all(rows[1:] > rows[:-1])) for rows in decoded)


def test_rows_that_are_in_memory_or_raw_are_gathered_in_their_order_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.repeat(np.arange(500, dtype="i4")[:, None], 4, axis=1)
    for kind in ("memory", "raw"):
        store = open_as(kind, data, 20, tmp_path)
        calls = counting(store, "_gather", monkeypatch)
        with rf.Pipeline(store, batch_size=50, shuffle="chunks", shuffle_chunks=5, seed=1, device="cpu", mover="copy") as pipe:
            order = order_of(500, pipe._batches.chunk_rows, 5, 1, 0)  # type: ignore[attr-defined]
            for batch in pipe:
                assert torch.equal(batch.data[:, 2].long(), batch.index)
        assert np.concatenate(calls).tolist() == order.tolist()


@pytest.mark.parametrize("kind", ["raw", "zstd", "zarr's zstd"])
def test_a_chunk_that_is_missing_fails_the_batches_that_need_it_alone(kind: str, tmp_path: Path) -> None:
    data = np.repeat(np.arange(400, dtype="i4")[:, None], 4, axis=1)
    open_as(kind, data, 20, tmp_path)
    path = tmp_path / f"{kind}.zarr"
    (path / "c" / "13" / "0").unlink()
    order = order_of(400, 20, 4, 2, 0)
    good = next(number for number in range(80) if 13 in set((order[number * 5 : number * 5 + 5] // 20).tolist()))
    store = rf.ZarrStore(path, strict=True, decoder="zarr" if kind == "zarr's zstd" else "auto")
    with rf.Pipeline(store, batch_size=5, shuffle="chunks", shuffle_chunks=4, seed=2, device="cpu") as pipe:
        live = iter(pipe)
        for number in range(good):
            batch = next(live)
            assert batch.index.tolist() == order[number * 5 : number * 5 + 5].tolist()
            assert torch.equal(batch.data[:, 1].long(), batch.index)
        with pytest.raises(FileNotFoundError, match="c/13/0"):
            next(live)
    assert good > 0


def test_what_was_written_between_two_epochs_is_seen_by_the_second(tmp_path: Path) -> None:
    data = np.zeros((60, 4), "f4")
    open_as("zstd", data, 10, tmp_path)
    with rf.Pipeline(tmp_path / "zstd.zarr", batch_size=60, shuffle="chunks", shuffle_chunks=6, device="cpu") as pipe:
        assert float(next(iter(pipe)).data.sum()) == 0
        with rf.ZarrStore(tmp_path / "zstd.zarr", "r+") as other:
            other.scatter(range(60), torch.ones(60, 4))
        pipe.set_epoch(0)  # the same order, so the same group
        assert float(next(iter(pipe)).data.sum()) == 240


def test_what_is_held_is_a_group_and_is_given_back(tmp_path: Path) -> None:
    data = np.ones((900, 4), "f4")
    with rf.Pipeline(
        open_as("zstd", data, 30, tmp_path), batch_size=10, shuffle="chunks", shuffle_chunks=3, device="cpu"
    ) as pipe:
        parts = pipe._parts
        assert parts is not None
        [[mover]] = parts.movers
        for _ in pipe:
            assert mover.held() == 90 * 16
        mover.rest()
        assert mover.held() == 0
