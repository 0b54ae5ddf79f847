"""Every kind of store through a pipeline: rows that are read, rows that are written, and files that keep their layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore, MemmapStore, PinnedStore, Store, ZarrStore, create_store
from rowferry.stores.testing import OracleStore, bits, random_bits, write_npy_file

Make = Callable[..., Pipeline]


def rows_seen(pipe: Pipeline) -> list[list[int]]:
    """Row numbers of each batch of an epoch, told by the rows themselves."""
    return [(batch.data[:, 0] // 100).long().tolist() for batch in pipe]


# ---- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [{}, {"fortran": True}, {"big_endian": True}, {"version": (2, 0)}, {"offset": 201}],
    ids=lambda layout: str(layout),
)
def test_npy_files_of_any_layout_are_served_and_left_as_they_were(
    windowed: Make, tmp_path: Path, layout: dict[str, Any]
) -> None:
    values = random_bits((30, 5), torch.float32)
    path = write_npy_file(tmp_path / "x.npy", values, **layout)
    before = path.read_bytes()
    with MemmapStore(path) as store, windowed(store, batch_size=8, shuffle=True) as pipe:
        for batch in pipe:
            assert bits(batch.data) == bits(values[batch.index])
            batch.data.add_(1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zarr_arrays_are_served_from_chunks(windowed: Make, tmp_path: Path, zarr_format: Any) -> None:
    values = np.random.default_rng(0).random((50, 4))
    opened = zarr.create_array(tmp_path / "x.zarr", shape=values.shape, chunks=(8, 3), dtype="f8", zarr_format=zarr_format)
    opened[:] = values
    with ZarrStore(tmp_path / "x.zarr") as store, windowed(store, batch_size=7, shuffle=True) as pipe:
        for batch in pipe:
            assert torch.equal(batch.data, torch.from_numpy(values)[batch.index])


def test_a_sharded_zarr_made_by_us_is_served(windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor]) -> None:
    values = numbered(40)
    with create_store(tmp_path / "x.zarr", (40, 3), torch.float32, chunks=4, shards=16) as store:
        store.scatter(range(40), values)
        with windowed(store, batch_sampler=[[39, 0, 17], [4, 4]]) as pipe:
            assert rows_seen(pipe) == [[39, 0, 17], [4, 4]]


def test_a_pinned_store_is_served(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(PinnedStore.from_array(numbered(20)), batch_sampler=[[19, 3], [3, 3]]) as pipe:
        assert rows_seen(pipe) == [[19, 3], [3, 3]]


def test_a_store_of_the_users_own_is_served_by_its_gather(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    with windowed(OracleStore(numbered(20)), batch_sampler=[[19, 3], [3, 3]]) as pipe:
        assert rows_seen(pipe) == [[19, 3], [3, 3]]


def test_a_path_an_array_and_a_tensor_are_taken_as_stores(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor]
) -> None:
    path = write_npy_file(tmp_path / "x.npy", numbered(6))
    for source in (str(path), path, numbered(6), numbered(6).numpy()):
        with windowed(source, batch_sampler=[[5, 2]]) as pipe:
            assert rows_seen(pipe) == [[5, 2]]


def test_stores_of_different_kinds_are_columns_of_one_table(
    tmp_path: Path, windowed: Make, numbered: Callable[..., Tensor]
) -> None:
    with create_store(tmp_path / "y.npy", (6,), torch.int64) as labels:
        labels.scatter(range(6), torch.arange(6) * 7)
        with windowed((numbered(6), labels), batch_sampler=[[5, 2], [0]]) as pipe:
            for x, y in pipe:
                assert torch.equal(x[:, 0].long() // 100 * 7, y)


def test_without_a_gpu_batches_are_on_the_cpu(numbered: Callable[..., Tensor]) -> None:
    with Pipeline(numbered(4), batch_size=2, device="cpu") as pipe:
        assert {batch.data.device.type for batch in pipe} == {"cpu"}


# ---- writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [{}, {"fortran": True}, {"big_endian": True}, {"offset": 201}], ids=lambda layout: str(layout)
)
def test_an_npy_file_of_any_layout_keeps_it_and_changes_in_its_written_rows_only(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor], layout: dict[str, Any]
) -> None:
    path = write_npy_file(tmp_path / "x.npy", numbered(30), **layout)
    wanted = numbered(30)
    wanted[[3, 4, 29]] += 1
    with MemmapStore(path, "r+") as store, windowed(store, batch_sampler=[[3, 4], [5], [29]], writable=True) as pipe:
        for batch in pipe:
            if batch.number != 1:
                batch.write_back(batch.values + 1)
        pipe.flush()
        program = f"import numpy; print(numpy.load({str(path)!r}).sum())"  # a fresh process sees it
        assert float(subprocess.check_output([sys.executable, "-c", program])) == wanted.sum().item()
    assert path.read_bytes() == write_npy_file(tmp_path / "wanted.npy", wanted, **layout).read_bytes()


@pytest.mark.parametrize("layout", [{}, {"chunks": 4}, {"chunks": 4, "shards": 16}], ids=str)
def test_a_zarr_is_trained_through_its_chunks(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor], layout: dict[str, int]
) -> None:
    path = tmp_path / "x.zarr"
    with create_store(path, (30, 3), torch.float32, **layout) as store:  # type: ignore[arg-type]
        store.scatter(range(30), numbered(30))
        with windowed(store, batch_sampler=[[3, 4, 29], [5, 3], [29]], writable=True) as pipe:
            for batch in pipe:
                batch.write_back(batch.values + 1)
    wanted = numbered(30)
    for rows in ([3, 4, 29], [5, 3], [29]):
        wanted[rows] += 1
    with ZarrStore(path) as again:
        assert torch.equal(again.gather(range(30)), wanted)


def test_a_pinned_store_is_written_in_place(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    store = PinnedStore.from_array(numbered(10))
    with pipeline(store, batch_sampler=[[1, 2], [2]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
    assert (store.numpy() - numbered(10).numpy())[:, 0].tolist() == [0, 1, 2, *[0] * 7]


def test_columns_in_stores_of_different_kinds_are_written_together(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor]
) -> None:
    with create_store(tmp_path / "m.npy", (9, 3), torch.float32) as moments:
        source: dict[str, Store] = {"w": ArrayStore(numbered(9)), "m": moments}
        with windowed(source, batch_size=2, writable=True) as pipe:
            for batch in pipe:
                batch.write_back({"w": batch.values["w"] + 1, "m": batch.values["w"]})
        assert torch.equal(moments.gather(range(9)), numbered(9))
        assert torch.equal(source["w"].gather(range(9)), numbered(9) + 1)


def test_an_array_in_strides_of_its_own_is_written_where_it_is(windowed: Make) -> None:
    array = np.zeros((3, 10), np.float32).T
    with windowed(array, batch_sampler=[[1, 9], [9]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
    assert array.sum(1).tolist() == [0, 3, 0, 0, 0, 0, 0, 0, 0, 6]
