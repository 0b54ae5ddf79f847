"""``rowferry inspect`` tells what a file holds and what a random row costs, and refuses what it can't read in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec

Ask = Callable[..., dict[str, object]]


@pytest.fixture
def group(tmp_path: Path, rows: NDArray[np.float32]) -> Path:
    """A group with a sharded array that says what it means, and a plain one."""
    path = tmp_path / "weather.zarr"
    root = zarr.create_group(path)
    sharded = root.create_array(
        "wind",
        shape=rows.shape,
        dtype=rows.dtype,
        chunks=(10, 128),
        shards=(100, 128),
        dimension_names=("time", "cell"),
        compressors=Crc32cCodec(),  # a chunk must be read whole, and stays as large as it is
    )
    sharded[:] = rows
    sharded.attrs.update({"units": "m/s", "scale_factor": 0.5, "add_offset": float("nan")})
    root.create_array("mask", shape=(5,), dtype="bool", chunks=(5,))
    return path


def test_an_npy_file_is_described(ask: Ask, npy: Path) -> None:
    said = ask("inspect", npy)
    assert said["store"] == "MemmapStore"
    assert (said["shape"], said["dtype"], said["rows"], said["row_shape"]) == ([1000, 128], "float32", 1000, [128])
    assert (said["row_bytes"], said["bytes"]) == (512, 512_000)
    assert said["rows_decoded_per_row_used"] == 1
    assert said["chunks"] is None


def test_a_random_row_of_a_mapped_file_costs_whole_pages_and_less_in_a_window(ask: Ask, npy: Path) -> None:
    cost = ask("inspect", npy)["random_row"]
    assert isinstance(cost, dict)
    assert 4096 <= cost["alone_bytes"] <= 8192
    assert cost["window_bytes"] < cost["alone_bytes"]
    assert cost["alone_microseconds"] > cost["window_microseconds"] > 0


def test_a_row_of_a_file_in_fortran_order_costs_a_page_an_element(ask: Ask, tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.asfortranarray(np.zeros((50_000, 16), np.float32)))
    said = ask("inspect", tmp_path / "f.npy")
    cost = said["random_row"]
    assert isinstance(cost, dict)
    assert cost["alone_bytes"] == 16 * 4096
    assert 0 < cost["window_bytes"] < 4096
    assert str(said["order"]).startswith("Fortran")


def test_a_sharded_zarr_is_described_with_dimensions_units_and_scale(ask: Ask, group: Path) -> None:
    said = ask("inspect", group, "--array", "wind")
    assert (said["store"], said["zarr_format"]) == ("ZarrStore", 3)
    assert (said["chunks"], said["shards"]) == ([10, 128], [100, 128])
    assert said["dimension_names"] == ["time", "cell"]
    assert (said["units"], said["scale_factor"], said["add_offset"]) == ("m/s", 0.5, "nan")


def test_a_random_row_of_a_zarr_costs_its_chunk_and_less_in_a_window(ask: Ask, group: Path) -> None:
    said = ask("inspect", group, "--array", "wind")
    cost = said["random_row"]
    assert isinstance(cost, dict)
    assert said["rows_decoded_per_row_used"] == 10
    assert 1 <= cost["window_decoded"] < 10
    if cost["alone_bytes"] is not None:  # the system counts what a process reads
        assert cost["alone_bytes"] >= 2 * 512  # ten rows, less what was decoded for a row before
        assert cost["window_bytes"] < cost["alone_bytes"]


def test_rows_read_for_a_row_used_are_told_for_both_shuffles(ask: Ask, group: Path, tmp_path: Path) -> None:
    said = ask("inspect", group, "--array", "wind")["rows_read_per_row_used"]
    assert said == {"shuffle=True": 1.0, "shuffle='chunks'": 1.0}  # it fits one window
    zarr.create_array(tmp_path / "large.zarr", shape=(10**9, 128), chunks=(10**5, 128), dtype="f4")
    said = ask("inspect", tmp_path / "large.zarr")["rows_read_per_row_used"]
    assert isinstance(said, dict)
    assert said["shuffle=True"] > 100
    assert said["shuffle='chunks'"] == 1


def test_a_row_of_a_raw_zarr_costs_its_pages_and_no_chunk(ask: Ask, tmp_path: Path, rows: NDArray[np.float32]) -> None:
    zarr.create_array(tmp_path / "raw.zarr", data=rows, chunks=(100, 128), compressors=None)
    said = ask("inspect", tmp_path / "raw.zarr")
    cost = said["random_row"]
    assert isinstance(cost, dict)
    assert said["rows_decoded_per_row_used"] == 1
    assert 4096 <= cost["alone_bytes"] <= 8192


def test_a_zarr_group_without_an_array_named_lists_the_arrays(refused: Callable[..., str], group: Path) -> None:
    line = refused("inspect", group)
    assert "wind" in line
    assert "mask" in line


def test_a_file_without_rows_is_described(ask: Ask, tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.empty((0, 3), np.int16))
    said = ask("inspect", tmp_path / "none.npy")
    assert (said["rows"], said["row_bytes"], said["random_row"]) == (0, 6, None)


def test_bytes_that_npy_cannot_name_are_read_once_their_dtype_is_given(
    ask: Ask, refused: Callable[..., str], tmp_path: Path
) -> None:
    np.save(tmp_path / "half.npy", np.zeros((4, 8), "V2"))
    assert "dtype" in refused("inspect", tmp_path / "half.npy")
    assert ask("inspect", tmp_path / "half.npy", "--stored-dtype", "bfloat16")["dtype"] == "bfloat16"


@pytest.mark.parametrize("command", ["inspect", "stream"])
@pytest.mark.parametrize(
    "name", ["missing.npy", "cut.npy", "words.npy", "many.npz", "objects.npy", "rows.parquet", "empty.zarr"]
)
def test_what_cannot_be_read_is_refused_in_one_line_that_names_it(
    refused: Callable[..., str], tmp_path: Path, npy: Path, command: str, name: str
) -> None:
    (tmp_path / "cut.npy").write_bytes(npy.read_bytes()[:1000])
    (tmp_path / "words.npy").write_text("not an array\n")
    np.savez(tmp_path / "many.npz", np.zeros(3))
    np.save(tmp_path / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty.zarr").mkdir()
    assert name in refused(command, tmp_path / name)
    assert name in refused(command, tmp_path / name, "--json")


def test_an_unknown_dtype_is_refused(refused: Callable[..., str], npy: Path) -> None:
    assert "'floaty'" in refused("inspect", npy, "--stored-dtype", "floaty")


def test_inspecting_changes_nothing(ask: Ask, npy: Path) -> None:
    before = npy.read_bytes(), npy.stat().st_mtime_ns
    ask("inspect", npy)
    assert (npy.read_bytes(), npy.stat().st_mtime_ns) == before
    assert [path.name for path in npy.parent.iterdir()] == ["rows.npy"]


def test_a_person_reads_the_same_in_a_table(run: Callable[..., object], group: Path) -> None:
    text = getattr(run("inspect", group, "--array", "wind"), "stdout", "")
    for part in (
        "1000 x 128",
        "float32",
        "512 bytes",
        "500.0 KiB",
        "time, cell",
        "m/s",
        "10 when read alone",
        "mean of 64 rows",
    ):
        assert part in text
