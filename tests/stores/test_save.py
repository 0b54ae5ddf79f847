"""Saving: the old file or the whole new one, and nothing else in the folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from rowferry.stores import ArrayStore, DeviceStore, _files, create_store, open_store
from rowferry.stores.testing import FailingStore, OracleStore, bits, random_bits

SUFFIXES = pytest.mark.parametrize("suffix", [".npy", ".zarr"])
SRC = Path(__file__).parents[2] / "src"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@SUFFIXES
def test_a_saved_store_opens_with_the_same_rows_and_dtype(tmp_path: Path, suffix: str) -> None:
    values = random_bits((500, 7), torch.float16)
    ArrayStore(values).save(tmp_path / f"x{suffix}")
    with open_store(tmp_path / f"x{suffix}", "r+") as store:
        assert store.dtype == torch.float16
        assert bits(store.gather(slice(None))) == bits(values)
    assert names(tmp_path) == [f"x{suffix}"]


@SUFFIXES
def test_saving_again_replaces_what_was_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    ArrayStore(torch.zeros(30, 2)).save(path)
    ArrayStore(torch.ones(3, 5, dtype=torch.float64)).save(str(path))
    with open_store(path) as store:
        assert store.gather(slice(None)).equal(torch.ones(3, 5, dtype=torch.float64))
    assert names(tmp_path) == [path.name]


def test_a_reader_of_the_old_file_keeps_the_old_rows(tmp_path: Path) -> None:
    ArrayStore(torch.zeros(3, 2)).save(tmp_path / "x.npy")
    with open_store(tmp_path / "x.npy") as old:
        ArrayStore(torch.ones(3, 2)).save(tmp_path / "x.npy")
        assert old.gather([0]).tolist() == [[0, 0]]


@SUFFIXES
def test_a_store_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    ArrayStore(torch.zeros(3, 2)).save(path)
    failing = FailingStore(OracleStore(torch.ones(5, 2)), OSError("bad sector"), rows=[4])
    with pytest.raises(OSError, match="bad sector") as caught:
        failing.save(path)
    assert f"to {path}" in caught.value.__notes__[0]
    assert names(tmp_path) == [path.name]
    assert open_store(path).gather(slice(None)).equal(torch.zeros(3, 2))


@SUFFIXES
def test_a_file_that_is_open_for_writing_is_not_replaced(tmp_path: Path, suffix: str) -> None:
    with create_store(tmp_path / f"x{suffix}", (3, 2), torch.float32) as store:
        for source in (ArrayStore(torch.ones(3, 2)), store):
            with pytest.raises(BlockingIOError, match=f"open for writing in process {os.getpid()}"):
                source.save(tmp_path / f"x{suffix}")
        store.scatter([0], torch.full((1, 2), 7.0))
    assert open_store(tmp_path / f"x{suffix}").gather([0]).tolist() == [[7, 7]]


def test_a_zarr_that_cannot_be_exchanged_in_one_step_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ArrayStore(torch.zeros(3, 2)).save(tmp_path / "x.zarr")
    monkeypatch.setattr(_files, "_RENAME_EXCHANGE", 1 << 20)  # a flag that no system knows, as an old one knows ours
    with pytest.raises(OSError, match="cannot be replaced in one step here; remove it first"):
        ArrayStore(torch.ones(3, 2)).save(tmp_path / "x.zarr")
    assert names(tmp_path) == ["x.zarr"]
    assert open_store(tmp_path / "x.zarr").gather(slice(None)).equal(torch.zeros(3, 2))


def test_a_group_with_other_arrays_is_not_replaced(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "g.zarr", mode="w").create_array("a", data=np.zeros(3))
    with pytest.raises(ValueError, match="group"):
        ArrayStore(torch.ones(3)).save(tmp_path / "g.zarr")
    assert zarr.open_array(tmp_path / "g.zarr", path="a", mode="r").shape == (3,)


@pytest.mark.parametrize("name", ["x.npz", "x", "x.zip"])
def test_a_kind_that_cannot_be_written_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\.npy|\.zarr"):
        ArrayStore(torch.ones(3)).save(name)
    assert names(tmp_path) == []


def test_a_folder_in_the_way_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").mkdir()
    with pytest.raises(FileExistsError, match="neither a file nor"):
        ArrayStore(torch.ones(3)).save(tmp_path / "x.npy")


def test_rows_of_a_device_are_saved(tmp_path: Path) -> None:
    values = random_bits((9, 3), torch.bfloat16)
    DeviceStore(values).save(tmp_path / "x.npy")
    assert bits(open_store(tmp_path / "x.npy", dtype=torch.bfloat16).gather(slice(None))) == bits(values)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.float64), (torch.float64, torch.float16)])
def test_each_save_is_a_file_of_its_own_dtype(tmp_path: Path, dtype: torch.dtype, other: torch.dtype) -> None:
    with create_store(tmp_path / "table.npy", (4, 2), dtype) as store:
        store.save(tmp_path / "a.npy")
        store.scatter([1], torch.ones(1, 2, dtype=other))
        store.save(tmp_path / "b.npy")
    for name, value in (("a.npy", 0), ("b.npy", 1)):
        found = np.load(tmp_path / name)
        assert found.dtype == np.dtype(str(dtype).removeprefix("torch."))
        assert found[1].tolist() == [value, value]


def test_a_process_that_is_killed_while_it_saves_leaves_the_old_file(tmp_path: Path) -> None:
    ArrayStore(torch.zeros(3, 2)).save(tmp_path / "x.npy")
    code = """
import os, signal, sys, torch
from rowferry.stores.testing import OracleStore, SlowStore

store = SlowStore(OracleStore(torch.ones(5, 2)))
store.reads.clear()
store.blocked.set = lambda: os.kill(os.getpid(), signal.SIGKILL)
store.save(sys.argv[1])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.npy")],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2  # the old file, and a hidden one that nothing opens by mistake
    assert names(tmp_path)[0].startswith(".x.")
    assert open_store(tmp_path / "x.npy").gather(slice(None)).equal(torch.zeros(3, 2))
