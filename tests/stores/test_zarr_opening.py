"""Opening a zarr array: by path, by name, from a zip or a handle; what is refused, and what others change afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore, ZipStore

from rowferry.stores import ZarrStore

DATA = np.arange(30, dtype="f4").reshape(10, 3)
SHUFFLED = [9, 3, 4, 8, 3, 0, 9]


def put(path: Path, data: NDArray[Any], **layout: Any) -> Path:
    zarr.create_array(path, shape=data.shape, dtype=data.dtype, **{"compressors": None, **layout})[...] = data
    return path


def test_a_zip_is_read_and_never_written(tmp_path: Path) -> None:
    with ZipStore(tmp_path / "a.zarr.zip", mode="w") as archive:
        zarr.create_group(archive).create_array("x", shape=DATA.shape, dtype="f4", chunks=(4, 3))[...] = DATA
    with ZarrStore(tmp_path / "a.zarr.zip", array="x") as store:
        assert np.array_equal(store.gather(SHUFFLED).numpy(), DATA[SHUFFLED])
        assert not store.writable
    with pytest.raises(PermissionError, match=r"a\.zarr\.zip is a zip"):
        ZarrStore(tmp_path / "a.zarr.zip", "r+", array="x")


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_array_inside_a_group_is_named(tmp_path: Path, zarr_format: Any) -> None:
    group = zarr.create_group(tmp_path / "g.zarr", zarr_format=zarr_format)
    data = np.arange(8, dtype="f4").reshape(4, 2)
    group.create_array("layers/weight", shape=data.shape, dtype="f4", chunks=(2, 2))[...] = data
    group.create_array("bias", shape=(3,), dtype="f4")
    assert np.array_equal(ZarrStore(tmp_path / "g.zarr", array="layers/weight").gather([3, 1]).numpy(), data[[3, 1]])
    with pytest.raises(ValueError, match=r"g\.zarr is a group.*bias, layers/weight"):
        ZarrStore(tmp_path / "g.zarr")
    with pytest.raises(ValueError, match=r"no array 'layers'.*bias, layers/weight"):
        ZarrStore(tmp_path / "g.zarr", array="layers")


def test_an_open_array_is_taken_as_it_is_and_stays_open(tmp_path: Path) -> None:
    array = zarr.open_array(put(tmp_path / "a.zarr", DATA, chunks=(4, 3)), mode="r")
    with ZarrStore(array) as store:
        assert np.array_equal(store.gather(SHUFFLED).numpy(), DATA[SHUFFLED])
        assert store.identity == ZarrStore(tmp_path / "a.zarr").identity
    assert np.array_equal(np.asarray(array[3]), DATA[3])
    with pytest.raises(PermissionError, match="read-only"):
        ZarrStore(array, "r+")


def test_what_cannot_be_rows_is_refused_with_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.zarr does not exist"):
        ZarrStore(tmp_path / "nowhere.zarr")
    (tmp_path / "folder.zarr").mkdir()
    with pytest.raises(ValueError, match=r"folder\.zarr holds no zarr array"):
        ZarrStore(tmp_path / "folder.zarr")
    (tmp_path / "file.zarr").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"file\.zarr is a file"):
        ZarrStore(tmp_path / "file.zarr")
    with pytest.raises(ValueError, match=r"scalar\.zarr has rank 0"):
        ZarrStore(put(tmp_path / "scalar.zarr", np.array(3.0)))
    kinds: dict[str, Any] = {"datetime": "M8[ns]", "text": "U4", "bytes": "S3", "structured": [("a", "f4"), ("b", "i4")]}
    for kind, dtype in kinds.items():
        path = tmp_path / f"{kind}.zarr"
        zarr.create_array(path, shape=(3, 2), dtype=np.dtype(dtype), zarr_format=2, filters=None, compressors=None)
        with pytest.raises(TypeError, match=rf"{path.name} has elements of"):
            ZarrStore(path)
    raw = put(tmp_path / "raw.zarr", np.zeros((3, 2), "V2"), zarr_format=2)
    with pytest.raises(TypeError, match=r"raw\.zarr has raw elements of 2 bytes; .*bfloat16"):
        ZarrStore(raw)
    floats = put(tmp_path / "floats.zarr", np.zeros((3, 2), "f4"))
    with pytest.raises(TypeError, match=r"rows are torch\.float32, not torch\.float16"):
        ZarrStore(floats, dtype=torch.float16)
    with pytest.raises(ValueError, match="mode is 'w'"):
        ZarrStore(floats, "w")  # type: ignore[arg-type]


def test_a_fresh_open_of_a_consolidated_group_sees_rows_appended_since(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g.zarr", zarr_format=2)
    group.create_array("x", shape=(4, 2), dtype="f4", chunks=(2, 2))[...] = 1
    zarr.consolidate_metadata(tmp_path / "g.zarr")
    old = ZarrStore(tmp_path / "g.zarr", array="x")
    zarr.open_array(tmp_path / "g.zarr/x").append(np.full((3, 2), 2, "f4"))
    fresh = ZarrStore(tmp_path / "g.zarr", array="x")
    assert len(fresh) == 7
    assert (fresh.gather([5, 6]) == 2).all()
    with pytest.raises(IndexError, match="row 5 is out of range"):
        old.gather([5])


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_rows_that_another_handle_cut_off_are_an_error_and_not_fill_values(tmp_path: Path, where: str) -> None:
    home: Any = tmp_path / "a.zarr" if where == "disk" else MemoryStore()
    array = zarr.create_array(home, shape=(8, 2), dtype="f4", chunks=(2, 2), fill_value=9)
    array[...] = 1
    store = ZarrStore(home) if where == "disk" else ZarrStore(zarr.open_array(home))
    array.resize((3, 2))
    with pytest.raises(IndexError, match=r"row 5 of .* is gone: it had 8 rows when it was opened, and was resized to 3"):
        store.gather([0, 5])
    assert (store.gather([2, 0]) == 1).all()


def test_the_description_is_plain_and_complete(tmp_path: Path) -> None:
    zarr.create_array(
        tmp_path / "a.zarr",
        shape=(10, 4),
        dtype="i2",
        chunks=(2, 4),
        shards=(4, 4),
        compressors=zarr.codecs.ZstdCodec(),
        dimension_names=("time", "x"),
        attributes={"units": "K", "scale_factor": 0.01, "add_offset": 273.15},
    )
    assert ZarrStore(tmp_path / "a.zarr").describe() == {
        "dimension_names": ["time", "x"],
        "units": "K",
        "scale_factor": 0.01,
        "add_offset": 273.15,
        "chunks": [2, 4],
        "shards": [4, 4],
        "compressor": ["zstd"],
        "zarr_format": 3,
    }
    path = put(tmp_path / "b.zarr", DATA, zarr_format=2, compressors=numcodecs.Blosc(), chunks=(2, 2))
    old = ZarrStore(path).describe()
    assert (old["compressor"], old["shards"], old["units"], old["zarr_format"]) == (["blosc"], None, None, 2)


FORK = """
import os, signal, sys
from rowferry.stores import ZarrStore
store = ZarrStore(sys.argv[1])
store.gather([0])
if (child := os.fork()) == 0:
    signal.alarm(10)
    try:
        store.gather([1])
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.gather([1]).tolist())
"""


@pytest.mark.parametrize("suffix", [".zarr", ".zip"])
def test_a_forked_child_is_told_to_spawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".zip":
        with ZipStore(path, mode="w") as archive:
            zarr.create_array(archive, shape=(2, 1), dtype="i4", chunks=(1, 1))[...] = [[3], [4]]
    else:
        put(path, np.array([[3], [4]], "i4"), chunks=(1, 1))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == ["7", "[[4]]\n"]


@pytest.mark.parametrize("suffix", ["", ".zip"])
def test_a_closed_store_keeps_no_file_mapped_though_somebody_holds_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.zarr{suffix}"
    if suffix:
        with ZipStore(path, mode="w") as archive:
            zarr.create_array(archive, shape=DATA.shape, dtype="f4", chunks=(4, 3), compressors=None)[...] = DATA
    else:
        put(path, DATA, chunks=(4, 3))
    store = ZarrStore(path)
    store.gather([0, 9])
    assert str(path) in Path("/proc/self/maps").read_text()
    reading = store._reading
    store.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="closed"):  # a thread that comes too late
        reading.gather(np.arange(2), np.empty((2, 3), "f4"))
