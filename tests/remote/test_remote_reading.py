"""Rows behind a URL are those of the same file on a disk, and no more is asked for than they need."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rowferry as rf
from rowferry.stores.testing import write_npy_file, write_safetensors_file

Publish = Callable[[Path], str]
ROWS = 1000


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(ROWS * 64, dtype=torch.float32).view(ROWS, 64)


@pytest.fixture
def npy(tmp_path: Path, values: torch.Tensor) -> Path:
    np.save(tmp_path / "rows.npy", values.numpy())
    return tmp_path / "rows.npy"


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """What ``zarr.create_array`` takes: chunks and shards that fit or do not, other orders, byte orders and fill values."""
    row_shape = draw(st.sampled_from([(), (5,), (4, 6)]))
    rows = draw(st.integers(1, 40))
    chunk = [draw(st.integers(1, rows)), *(draw(st.integers(1, n)) for n in row_shape)]
    shards = [each * draw(st.integers(1, 3)) for each in chunk] if draw(st.booleans()) else None
    order = list(range(len(chunk)))
    if draw(st.integers(0, 3)) == 0:
        order.reverse()
    return {
        "shape": (rows, *row_shape),
        "chunks": tuple(chunk),
        "shards": tuple(shards) if shards else None,
        "dtype": draw(st.sampled_from(["<f4", ">f4", "<i8", ">i2", "u1"])),
        "compressors": draw(st.sampled_from([None, None, "auto"])),
        "fill_value": draw(st.sampled_from([0, 7])),
        "filters": [zarr.codecs.TransposeCodec(order=order)] if order != sorted(order) else None,
    }


@st.composite
def parts_of(draw: st.DrawFn, row_shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """What ``select=`` takes for rows of this shape; None for whole rows, as often."""
    if not row_shape or draw(st.booleans()):
        return None
    parts: list[Any] = []
    for n in row_shape:
        start = draw(st.integers(0, n - 1))
        parts.append(draw(st.sampled_from([start, slice(start, None), slice(start, n, 2), slice(None)])))
    return tuple(parts)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), data=st.data())
def test_any_zarr_reads_as_its_array_does(
    layout: dict[str, Any], data: st.DataObject, over_http: Publish, tmp_path: Path
) -> None:
    path = tmp_path / "any.zarr"
    shutil.rmtree(path, ignore_errors=True)
    array = zarr.create_array(path, **layout)
    rows, *row_shape = array.shape
    written = data.draw(st.integers(0, rows), label="rows written")  # chunks after them do not exist
    array[:written] = np.arange(written * int(np.prod(row_shape)), dtype=array.dtype).reshape(written, *row_shape)
    select = data.draw(parts_of(tuple(row_shape)), label="select")
    index = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=60), label="index")
    expected = np.asarray(array[:])[index]
    expected = expected[(slice(None), *select)] if select else expected
    with rf.open_store(over_http(path), select=select) as store:
        found = store.gather(index).numpy()
    assert found.dtype == expected.dtype.newbyteorder("=")
    assert np.array_equal(found, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([(1,), (50,), (50, 3), (7, 1, 9), (3, 300_000), (2000, 33)]),
    offset=st.sampled_from([None, 131]),
    big_endian=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_npy_reads_as_the_file_on_the_disk(
    shape: tuple[int, ...], offset: int | None, big_endian: bool, seed: int, over_http: Publish, tmp_path: Path
) -> None:
    values = torch.arange(int(np.prod(shape)), dtype=torch.float64).view(shape)
    path = write_npy_file(tmp_path / "any.npy", values, big_endian=big_endian, offset=offset)
    index = np.random.default_rng(seed).integers(-shape[0], shape[0], min(200, 3 * shape[0]))
    with rf.open_store(over_http(path)) as store, rf.open_store(path) as local:
        assert store.gather(index).equal(local.gather(index))
        assert store.gather(slice(None)).equal(values)


def test_rows_of_a_megabyte_and_more_come_in_several_requests(over_http: Publish, files: Any, tmp_path: Path) -> None:
    values = torch.arange(3 * 1_500_000, dtype=torch.int32).view(3, 1_500_000)
    np.save(tmp_path / "wide.npy", values.numpy())
    with rf.open_store(over_http(tmp_path / "wide.npy")) as store:
        files.ranges.clear()
        assert store.gather([2, 0]).equal(values[[2, 0]])
        assert sum(last - first > 1 << 20 for _, first, last in files.ranges) >= 4


# ---- what is asked for ----------------------------------------------------------------------------------------


def test_opening_reads_the_header_and_rows_that_follow_one_another_are_one_request(
    npy: Path, over_http: Publish, files: Any
) -> None:
    with rf.open_store(over_http(npy)) as store:
        assert len(files.ranges) == 1
        files.ranges.clear()
        store.gather(range(100, 400))
        *rows, check = files.ranges
        assert [(last + 1 - first) for _, first, last in rows] == [300 * 256]
        assert check[1:] == (0, 0), "whether it was replaced is asked with one byte"


def test_only_the_rows_bytes_of_raw_chunks_are_read_and_only_chunks_that_select_touches(
    over_http: Publish, files: Any, tmp_path: Path
) -> None:
    array = zarr.create_array(tmp_path / "z.zarr", shape=(ROWS, 4, 64), chunks=(100, 1, 64), dtype="f4", compressors=None)
    array[:] = np.arange(ROWS * 256, dtype=np.float32).reshape(ROWS, 4, 64)
    with rf.open_store(over_http(tmp_path / "z.zarr"), select=np.s_[2, 8:16]) as store:
        files.ranges.clear()
        assert np.array_equal(store.gather([5, 950]).numpy(), np.asarray(array[:])[[5, 950], 2, 8:16])
        assert sorted(path for path, _, _ in files.ranges) == ["/z.zarr/c/0/2/0", "/z.zarr/c/9/2/0"]
        assert [last + 1 - first for _, first, last in files.ranges] == [32, 32]


def test_the_index_of_a_shard_is_fetched_once(over_http: Publish, files: Any, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "z.zarr", shape=(ROWS, 64), chunks=(10, 64), shards=(100, 64), dtype="f4", compressors=None
    )
    array[:] = 1
    with rf.open_store(over_http(tmp_path / "z.zarr")) as store:
        files.ranges.clear()
        store.gather([3, 503])
        assert len(files.ranges) == 4
        store.gather([4, 504])
        assert len(files.ranges) == 6


@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_many_requests_are_under_way_at_once(kind: str, over_http: Publish, files: Any, tmp_path: Path) -> None:
    if kind == "npy":
        values = np.arange(40 * 50_000, dtype=np.float32).reshape(40, 50_000)
        np.save(tmp_path / "rows.npy", values)
    else:
        values = np.arange(40 * 10, dtype=np.float32).reshape(40, 10)
        zarr.create_array(tmp_path / "rows.zarr", data=values, chunks=(1, 10), compressors=None)
    with rf.open_store(over_http(tmp_path / f"rows.{kind}")) as store:
        wanted = range(0, 32, 2)  # rows apart: a request each
        files.together = threading.Barrier(16)  # no request is answered before 16 are there
        found = store.gather(wanted)
        files.together = None
    assert np.array_equal(found.numpy(), values[::2][:16])


# ---- where it is used -----------------------------------------------------------------------------------------


def test_a_pipeline_serves_remote_rows_in_its_order_and_resumes(npy: Path, over_s3: Publish, values: torch.Tensor) -> None:
    with rf.open_store(over_s3(npy)) as store:
        with rf.Pipeline(store, batch_size=100, shuffle=True, seed=1) as pipe:
            batches = iter(pipe)
            first = [next(batches) for _ in range(3)]
            state = pipe.state_dict()
        with rf.Pipeline(store, batch_size=100, shuffle=True, seed=1) as pipe:
            pipe.load_state_dict(state)
            rest = list(pipe)
    assert all(batch.data.equal(values[batch.index]) for batch in [*first, *rest])
    assert torch.cat([batch.index for batch in [*first, *rest]]).sort().values.equal(torch.arange(ROWS))


def test_rows_can_be_read_where_an_event_loop_runs_already(npy: Path, over_http: Publish, values: torch.Tensor) -> None:
    with rf.open_store(over_http(npy)) as store:

        async def in_a_notebook() -> torch.Tensor:
            return store.gather([5, 6])

        assert asyncio.run(in_a_notebook()).equal(values[5:7])


def test_the_event_loop_of_the_calling_thread_stays_what_it_was(npy: Path, over_http: Publish) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        with rf.open_store(over_http(npy)) as store:
            store.gather([1])
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_a_tensor_of_a_model_in_several_files_is_found_by_the_index(
    over_s3: Publish, tmp_path: Path, values: torch.Tensor
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors_file(folder / "a.safetensors", {"x": values[:3]})
    write_safetensors_file(folder / "b.safetensors", {"embed": values, "y": values[:1]})
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "a.safetensors", "embed": "b.safetensors", "y": "b.safetensors"}}')
    for path in (folder / "a.safetensors", folder / "b.safetensors"):
        over_s3(path)
    url = over_s3(index)
    with rf.open_store(url, array="embed", select=np.s_[3:7]) as store:
        assert store.gather([9, 2]).equal(values[[9, 2], 3:7])
    with rf.open_store(url, array="x") as store:
        assert store.gather([0]).equal(values[:1])
    with pytest.raises(ValueError, match=r"pass array= to say which tensor; it has 'embed', 'x', 'y'"):
        rf.open_store(url)


def test_a_local_copy_of_a_remote_store_is_written_by_save(
    npy: Path, over_s3: Publish, values: torch.Tensor, tmp_path: Path
) -> None:
    with rf.open_store(over_s3(npy)) as store:
        store.save(tmp_path / "copy.npy")
    assert np.array_equal(np.load(tmp_path / "copy.npy"), values.numpy())


def test_a_group_lists_its_arrays_from_s3_and_over_http_where_its_metadata_is_consolidated(
    over_s3: Publish, over_http: Publish, tmp_path: Path, values: torch.Tensor
) -> None:
    group = zarr.open_group(tmp_path / "g.zarr", mode="w", zarr_format=2)
    group.create_array("w", data=values.numpy())
    with pytest.raises(ValueError, match=r"is a group; .*array=.*not listed by an HTTP server"):
        rf.open_store(over_http(tmp_path / "g.zarr"))
    with pytest.raises(ValueError, match=r"is a group; .*array=. Its arrays: w"):
        rf.open_store(over_s3(tmp_path / "g.zarr"))
    zarr.consolidate_metadata(tmp_path / "g.zarr")
    with pytest.raises(ValueError, match=r"is a group; .*array=. Its arrays: w"):
        rf.open_store(over_http(tmp_path / "g.zarr"))
    with rf.open_store(over_http(tmp_path / "g.zarr"), array="w") as store:
        assert store.gather([3]).equal(values[3:4])
        assert isinstance(store, rf.ZarrStore)
        assert store.describe()["zarr_format"] == 2


FORKED = """
import os, sys
import rowferry as rf
store = rf.open_store(sys.argv[1])
store.gather([0])
if (child := os.fork()) == 0:
    try:
        store.gather([1])
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_child_is_told_to_spawn(npy: Path, over_http: Publish) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, over_http(npy)], check=True, timeout=60)
