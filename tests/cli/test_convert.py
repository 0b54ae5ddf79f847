"""``rowferry convert`` rewrites rows in another layout, whole or not at all, and goes on where it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from typer.testing import Result

from rowferry.stores import ZarrStore, create_store, open_store
from rowferry.stores._convert import Layout, convert

Ask = Callable[..., dict[str, Any]]


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("compressor", ["raw", "zstd", "blosc"])
def test_an_npy_becomes_a_zarr_of_the_layout_asked_for_and_comes_back(
    ask: Ask, npy: Path, rows: NDArray[np.float32], compressor: str
) -> None:
    target = npy.with_name("rows.zarr")
    said = ask("convert", npy, target, "--chunk-rows", 16, "--shard-rows", 160, "--compressor", compressor)
    assert (said["rows"], said["rows_done_before"], said["compared"]) == (1000, 0, True)
    with open_store(target) as store:
        assert isinstance(store, ZarrStore)
        layout = store.describe()
        assert (layout["chunks"], layout["shards"]) == ([16, 128], [160, 128])
        assert layout["compressor"] == ([] if compressor == "raw" else [compressor])
        assert np.array_equal(store.gather(slice(None)).numpy(), rows)
    back = npy.with_name("back.npy")
    ask("convert", target, back)
    assert np.array_equal(np.load(back), rows)
    assert visible(npy.parent) == ["back.npy", "rows.npy", "rows.zarr"]


def test_attributes_and_names_of_dimensions_are_kept(ask: Ask, tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g.zarr")
    wind = group.create_array("wind", data=np.ones((10, 3), "i2"), dimension_names=("time", "x"))
    wind.attrs.update({"units": "m/s", "scale_factor": 0.1})
    ask("convert", tmp_path / "g.zarr", tmp_path / "wind.zarr", "--array", "wind", "--shard-rows", 0)
    with ZarrStore(tmp_path / "wind.zarr") as store:
        said = store.describe()
        assert store.attributes == {"units": "m/s", "scale_factor": 0.1}
    assert (said["dimension_names"], said["units"], said["shards"]) == (["time", "x"], "m/s", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex128, torch.float16])
def test_every_kind_of_element_is_compared_by_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.full((20, 3), float("nan")).to(dtype)
    with create_store(tmp_path / "a.npy", (20, 3), dtype) as source:
        source.scatter(slice(None), values)
        assert convert(source, tmp_path / "b.zarr", Layout(chunks=4, shards=8), lambda step, rows: None) == 0
    with open_store(tmp_path / "b.zarr") as copy:
        assert copy.dtype == dtype
        assert copy.gather(slice(None)).view(torch.uint8).equal(values.view(torch.uint8))


def test_what_is_there_is_never_overwritten(refused: Callable[..., str], npy: Path) -> None:
    before = npy.read_bytes()
    other = npy.with_name("other.npy")
    other.write_bytes(b"mine")
    assert "other.npy exists" in refused("convert", npy, other)
    assert "exists" in refused("convert", npy, npy)
    assert (other.read_bytes(), npy.read_bytes()) == (b"mine", before)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(refused: Callable[..., str], npy: Path) -> None:
    folder = npy.parent
    assert "rows.parquet" in refused("convert", npy, folder / "rows.parquet")
    assert "no folder" in refused("convert", npy, folder / "nowhere" / "x.zarr")
    assert "chunks" in refused("convert", npy, folder / "x.npy", "--chunk-rows", 3)
    assert "whole chunks" in refused("convert", npy, folder / "x.zarr", "--chunk-rows", 3, "--shard-rows", 4)
    assert visible(folder) == ["rows.npy"]


KILLED = """
import os, signal, sys
from rowferry.stores import _convert, open_store
_convert.PIECE_BYTES = _convert.DURABLE_BYTES = 20_000
step, rows = sys.argv[3], int(sys.argv[4])
def report(now, done):
    if now == step and done >= rows:
        os.kill(os.getpid(), signal.SIGKILL)
_convert.convert(open_store(sys.argv[1]), sys.argv[2], _convert.Layout(*LAYOUT), report)
"""


@pytest.mark.parametrize(("suffix", "layout"), [(".zarr", Layout(10, 30, "zstd")), (".npy", Layout())])
@pytest.mark.parametrize(("step", "rows_done"), [("copy", 0), ("copy", 500), ("compare", 500)])
def test_a_killed_conversion_goes_on_where_it_stopped(
    ask: Ask, npy: Path, rows: NDArray[np.float32], suffix: str, layout: Layout, step: str, rows_done: int
) -> None:
    target = npy.with_name(f"target{suffix}")
    code = KILLED.replace("LAYOUT", repr((layout.chunks, layout.shards, layout.compressor)))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", code, npy, target, step, str(rows_done)], env=env, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    with pytest.raises(ValueError, match="unfinished conversion of something else"), open_store(npy) as source:
        convert(source, target, Layout(5, 5, "blosc"), lambda step, rows: None)
    words = ["--chunk-rows", 10, "--shard-rows", 30, "--compressor", "zstd"] if suffix == ".zarr" else []
    said = ask("convert", npy, target, *words)
    assert 450 <= said["rows_done_before"] <= 1000 if rows_done else said["rows_done_before"] == 0
    with open_store(target) as store:
        assert np.array_equal(store.gather(slice(None)).numpy(), rows)
    assert visible(npy.parent) == sorted(["rows.npy", target.name])


def test_a_row_that_comes_back_different_is_an_error_and_nothing_appears(npy: Path) -> None:
    def spoil(step: str, done: int) -> None:
        if step == "copy" and done == 1000:  # what a broken disk would do: the source is not what it was
            with open_store(npy, "r+") as other:
                other.scatter([700], -torch.ones(1, 128))

    with open_store(npy) as source, pytest.raises(OSError, match=r"row 700 .* different"):
        convert(source, npy.with_name("target.zarr"), Layout(), spoil)
    assert not npy.with_name("target.zarr").exists()


def test_two_conversions_to_one_target_exclude_each_other(npy: Path) -> None:
    target = npy.with_name("target.zarr")

    def second(step: str, done: int) -> None:
        if step == "copy" and not done:
            with open_store(npy) as again, pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
                convert(again, target, Layout(), lambda step, rows: None)

    with open_store(npy) as source:
        convert(source, target, Layout(), second)
    assert target.exists()


def test_a_table_without_rows_is_converted(ask: Ask, tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.empty((0, 3), np.int16))
    assert ask("convert", tmp_path / "none.npy", tmp_path / "none.zarr")["rows"] == 0
    assert len(ZarrStore(tmp_path / "none.zarr")) == 0


def test_a_person_sees_what_was_done(run: Callable[..., Result], npy: Path) -> None:
    result = run("convert", npy, npy.with_name("rows.zarr"))
    assert result.exit_code == 0
    assert "1,000" in result.stdout
    assert "equal, bit for bit" in result.stdout
