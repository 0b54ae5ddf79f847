"""From a path or an object to a store: opened, created, or refused with what to do instead."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray

from rowferry.stores import (
    ArrayStore,
    DeviceStore,
    MemmapStore,
    PinnedStore,
    Store,
    ZarrStore,
    as_store,
    create_store,
    open_store,
)
from rowferry.stores.testing import EVERY_DTYPE, OracleStore, bits, random_bits

# ---- open_store ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [str, Path])
def test_the_suffix_decides_which_store_it_is(tmp_path: Path, convert: Any) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    for name in ("x.zarr", "folder"):
        zarr.create_array(tmp_path / name, shape=(3, 2), dtype="f8")
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    for name, kind in (("X.NPY", MemmapStore), ("x.zarr", ZarrStore), ("folder", ZarrStore)):
        with open_store(convert(tmp_path / name)) as store:
            assert type(store) is kind
            assert not store.writable
            assert store.shape == (3, 2)
            assert str(tmp_path / name) in repr(store)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ftp://host/x.npy", r"the scheme ftp://; known are s3://"),
        ("file:///tmp/x.npy", r"the scheme file://; known are s3://"),
        ("x.npz", r"\.npz is an archive"),
        ("x.h5", r"the suffix \.h5.*\.npy.*\.zarr"),
        ("x.npy.gz", r"the suffix \.gz"),
        ("x", "no suffix"),
        ("", "no suffix"),
    ],
)
def test_a_path_of_no_known_kind_is_refused_with_what_is_known(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        open_store(name)
    with pytest.raises(ValueError, match=reason):
        create_store(name, (2, 2), torch.float32)


@pytest.mark.parametrize("name", ["x.npy", "x.zarr", "x.zip"])
def test_a_path_that_is_not_there_is_a_file_not_found_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        open_store(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_is_no_path_is_a_type_error_that_names_as_store() -> None:
    not_a_path: Any = np.zeros(3)
    with pytest.raises(TypeError, match="as_store"):
        open_store(not_a_path)


def test_a_npy_has_no_arrays_inside(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ValueError, match="array='weight'"):
        open_store(tmp_path / "x.npy", array="weight")


def test_an_array_inside_a_zarr_group_is_opened_by_name(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "g.zarr", mode="w").create_array("a/b", data=np.arange(6.0).reshape(3, 2))
    with open_store(tmp_path / "g.zarr", array="a/b") as store:
        assert store.gather([2]).tolist() == [[4, 5]]
    with pytest.raises(ValueError, match="a/b"):
        open_store(tmp_path / "g.zarr")


# ---- create_store --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_a_created_store_is_zeros_of_its_dtype_and_reopens(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    path, new = tmp_path / f"x{suffix}", random_bits((2, 3), dtype)
    with create_store(path, (5, 3), dtype) as store:
        assert store.writable
        assert bits(store.gather(slice(None))) == bytes(15 * dtype.itemsize)
        store.scatter([4, 1], new)
    with open_store(path, dtype=dtype) as store:
        assert (store.shape, store.dtype) == ((5, 3), dtype)
        assert bits(store.gather([4, 1])) == bits(new)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        *((torch.float32, 1.5), (torch.float32, -0.0), (torch.bfloat16, 3), (torch.float8_e5m2, 2.0), (torch.int64, -1)),
        *((torch.bool, True), (torch.complex64, 1 - 2j), (torch.uint64, 7), (torch.float64, float("nan"))),
    ],
    ids=str,
)
def test_every_row_of_a_created_store_holds_the_fill(tmp_path: Path, suffix: str, dtype: torch.dtype, fill: Any) -> None:
    with create_store(tmp_path / f"x{suffix}", (50, 3), dtype, fill=fill) as store:
        assert bits(store.gather(slice(None))) == bits(torch.tensor(fill).to(dtype)) * 150


def test_a_fill_is_written_to_the_last_row_of_a_large_file(tmp_path: Path) -> None:
    with create_store(tmp_path / "x.npy", (100_003, 50), torch.float32, fill=2) as store:
        assert store.memory is not None
        assert bool((store.memory == 2).all())


def test_a_created_npy_is_what_numpy_would_write(tmp_path: Path) -> None:
    create_store(tmp_path / "x.npy", (3, 2), torch.float32, fill=1).close()
    np.save(tmp_path / "y.npy", np.ones((3, 2), np.float32))
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "y.npy").read_bytes()


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("shape", [(np.int64(3), np.int64(2)), [3, 2], torch.Size([3, 2]), (0, 2), (3,), (3, 0)], ids=str)
def test_shapes_of_any_integers_reopen(tmp_path: Path, suffix: str, shape: Any) -> None:
    create_store(tmp_path / f"x{suffix}", shape, torch.float32).close()
    with open_store(tmp_path / f"x{suffix}") as store:
        assert store.shape == tuple(shape)


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_what_exists_is_not_overwritten(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=rf"x\{suffix} exists"):
        create_store(path, (2, 2), torch.float32)
    assert path.read_text() == "mine"


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shape": ()}, ValueError, "shape"),
    ({"shape": (2, -1)}, ValueError, "shape"),
    ({"shape": (2.5, 2)}, TypeError, "float"),
    ({"dtype": np.float32}, TypeError, "torch dtype"),
    ({"dtype": "float32"}, TypeError, "torch dtype"),
    ({"fill": 300, "dtype": torch.uint8}, ValueError, "300"),
    ({"fill": 0.5, "dtype": torch.int32}, ValueError, r"0\.5"),
    ({"fill": 1j}, ValueError, "1j"),
    ({"fill": "x"}, ValueError, "'x'"),
    ({"fill": [1, 2]}, ValueError, r"\[1, 2\]"),
]


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize(("options", "error", "reason"), BAD, ids=str)
def test_a_store_that_cannot_be_made_leaves_no_file(
    tmp_path: Path, suffix: str, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    arguments: dict[str, Any] = {"shape": (2, 2), "dtype": torch.float32} | options
    with pytest.raises(error, match=reason):
        create_store(tmp_path / f"x{suffix}", **arguments)
    assert not list(tmp_path.iterdir())


def test_options_of_zarr_are_no_options_of_npy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunks, shards and compressor"):
        create_store(tmp_path / "x.npy", (2, 2), torch.float32, chunks=1)
    with create_store(tmp_path / "x.zarr", (100, 2), torch.float32, chunks=5, shards=10, compressor="zstd") as store:
        assert store.chunk_rows == 10


@pytest.mark.parametrize("rows", [1 << 40, 1 << 52])
def test_a_npy_that_the_disk_has_no_room_for_is_refused_and_leaves_no_file(tmp_path: Path, rows: int) -> None:
    with pytest.raises(OSError, match=r"x\.npy needs .* bytes of disk"):
        create_store(tmp_path / "x.npy", (rows, 256), torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        create_store(tmp_path / "no" / "x.npy", (2, 2), torch.float32)


def test_a_zip_cannot_be_created(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        create_store(tmp_path / "x.zip", (2, 2), torch.float32)


def test_a_created_npy_has_its_space(tmp_path: Path) -> None:
    with create_store(tmp_path / "x.npy", (1000, 256), torch.float32):
        found = os.stat(tmp_path / "x.npy")
        assert found.st_blocks * 512 >= found.st_size == 128 + 1000 * 1024


def test_of_many_that_create_one_npy_at_once_one_has_it(tmp_path: Path) -> None:
    start = threading.Barrier(6)

    def create(number: int) -> Store | None:
        start.wait()
        try:
            return create_store(tmp_path / "x.npy", (50, 2), torch.float32, fill=number)
        except (FileExistsError, BlockingIOError):
            return None

    with ThreadPoolExecutor(6) as pool:
        made = [store for store in pool.map(create, range(6)) if store is not None]
    assert len(made) == 1
    assert os.listdir(tmp_path) == ["x.npy"]
    value = made[0].gather([0, 49])
    made[0].close()
    assert open_store(tmp_path / "x.npy").gather([0, 49]).equal(value)


@pytest.mark.parametrize(("code", "made"), [(errno.EPERM, True), (errno.EACCES, False)])
def test_a_npy_is_created_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, made: bool
) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    with contextlib.nullcontext() if made else pytest.raises(PermissionError):
        create_store(tmp_path / "x.npy", (3, 2), torch.float32).close()
    assert os.listdir(tmp_path) == (["x.npy"] if made else [])


# ---- as_store ------------------------------------------------------------------------------------------------


def test_a_store_is_itself() -> None:
    store = OracleStore(torch.zeros(3))
    assert as_store(store) is store


def test_arrays_and_tensors_are_stores_over_their_own_memory() -> None:
    array: NDArray[Any] = np.zeros((3, 2))
    for each in (array, torch.from_numpy(array)):
        store = as_store(each)
        assert type(store) is ArrayStore
        store.scatter([1], torch.ones(1, 2))
        assert array[1].tolist() == [1, 1]
        array[1] = 0


def test_a_tensor_of_another_device_is_a_device_store() -> None:
    store = as_store(torch.zeros(3, 2, device="meta"))
    assert type(store) is DeviceStore
    assert store.shape == (3, 2)


def test_a_path_is_opened_to_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    for path in (tmp_path / "x.npy", str(tmp_path / "x.npy")):
        with as_store(path) as store:
            assert type(store) is MemmapStore
            assert not store.writable


def test_an_open_zarr_array_is_a_store_to_read() -> None:
    array = zarr.array(np.arange(6.0).reshape(3, 2))
    with as_store(array) as store:
        assert type(store) is ZarrStore
        assert store.gather([2]).tolist() == [[4, 5]]


@pytest.mark.parametrize(("obj", "reason"), [([[1.0]], "numpy.asarray"), (3, "int"), (None, "NoneType"), ({}, "dict")], ids=str)
def test_other_objects_are_refused_with_what_is_allowed(obj: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=re.escape(reason)):
        as_store(obj)


def test_a_file_is_loaded_into_pinned_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    store: Store = PinnedStore.load(tmp_path / "x.npy")
    assert store.gather([2]).tolist() == [[4, 5]]
    assert store.writable
