"""``rowferry bench`` measures within its time, on the user's sizes, and its records can be drawn and compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from typer.testing import Result

from rowferry._bench.overlap import RATIOS
from rowferry._bench.peers import PEERS

Run = Callable[..., Result]
Refused = Callable[..., str]

TINY = ("--rows", 2000, "--batch", 64, "--device", "cpu", "--threads", 1, "--seconds", 10)
WORKS = {
    "read, uniform",
    "read, Zipf",
    "write",
    "read, change and write",
    *(peer.name for peer in PEERS),
    *(f"compute/transfer {ratio:g}{how}" for ratio in RATIOS for how in ("", ", lookahead=0")),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Result, Path]:
    """One measurement: its record, what was printed, and the file."""
    from typer.testing import CliRunner

    from rowferry.cli import app

    path = tmp_path_factory.mktemp("bench") / "a.json"
    words = ["bench", *map(str, TINY), "--row-bytes", "64", "--json", str(path), "--plot", str(path.with_suffix(".png"))]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result, path


def test_a_record_says_what_was_measured_on_what(measured: tuple[dict[str, Any], Result, Path]) -> None:
    record, _, _ = measured
    assert (record["program"], record["format"]) == ("rowferry bench", 1)
    assert record["sizes"] == {
        "store": "PinnedStore",
        "path": None,
        "threads": 1,
        "rows": 2000,
        "row_bytes": 64,
        "batch": 64,
    }
    assert record["limit"]["kind"] == "memory"
    assert record["limit"]["to_device"] > 0
    assert record["host_threads"] == {"rowferry": 1, "torch": 1}
    assert set(record["machine"]) >= {"device", "gpu", "driver", "processor", "cores", "date", "torch", "numpy", "rowferry"}


def test_every_work_is_in_the_record_with_its_figures_or_why_it_has_none(
    measured: tuple[dict[str, Any], Result, Path],
) -> None:
    record, _, _ = measured
    assert {each["work"] for each in record["results"]} == WORKS
    for each in record["results"]:
        if "skipped" in each:
            assert each["skipped"] in ("CuPy needs a GPU", "no time was left for it")
            continue
        assert 0 < each["lowest"] <= each["ratio"] <= each["highest"]
        assert each["better"] == ("lower" if each["group"] == "overlap" else "higher")
        assert each["runs"] >= 1
    read = next(each for each in record["results"] if each["work"] == "read, uniform")
    assert read["gb_s"] == pytest.approx(64 * 64 / (read["ms"] / 1e3) / 1e9)
    assert read["ratio"] == pytest.approx(read["gb_s"] / record["limit"]["to_device"])
    assert read["mover"] == "local"


def test_a_person_reads_ratios_first_and_missing_peers_by_name(measured: tuple[dict[str, Any], Result, Path]) -> None:
    _, result, _ = measured
    assert "CuPy fancy indexing over pinned memory: CuPy needs a GPU" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if "read, uniform" in line]
    assert float(lines[0][0]) > 0
    heads = [line.split()[:2] for line in result.stdout.splitlines() if line.split()[:1] == ["ratio"]]
    assert heads == [["ratio", "work"]] * 4


def test_a_picture_is_drawn(measured: tuple[dict[str, Any], Result, Path]) -> None:
    assert measured[2].with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_two_records_are_compared_work_by_work(run: Run, measured: tuple[dict[str, Any], Result, Path], tmp_path: Path) -> None:
    record, _, path = measured
    other = json.loads(path.read_text())
    other["machine"]["processor"] = "another machine"
    for each in other["results"]:
        if "ratio" in each:
            each["ratio"] *= 2
    (tmp_path / "b.json").write_text(json.dumps(other))
    result = run("bench", "--compare", path, tmp_path / "b.json")
    assert result.exit_code == 0, result.output
    assert "2.00      read, uniform" in result.stdout
    assert "another machine" in result.stdout
    assert "machine processor" in result.stdout
    assert record["machine"]["processor"] in result.stdout


def test_a_file_is_read_and_not_written_and_its_time_is_kept(run: Run, npy: Path) -> None:
    before = npy.read_bytes()
    start = time.perf_counter()
    result = run("bench", npy, "--batch", 32, "--device", "cpu", "--threads", 1, "--seconds", 4, "--json", "-")
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start < 30  # four seconds, on a machine that others may use
    record = json.loads(result.stdout)
    assert record["sizes"]["store"] == "MemmapStore"
    assert (record["sizes"]["rows"], record["sizes"]["row_bytes"]) == (1000, 512)
    assert any("only read" in note for note in record["notes"])
    assert npy.read_bytes() == before


def test_a_zarr_array_of_a_group_is_measured_too(run: Run, tmp_path: Path, rows: NDArray[np.float32]) -> None:
    zarr.create_group(tmp_path / "g.zarr").create_array("x", data=rows, chunks=(50, 128))
    words = ("--batch", 16, "--device", "cpu", "--threads", 1, "--seconds", 5, "--json", "-")
    result = run("bench", tmp_path / "g.zarr", "--array", "x", *words)
    assert result.exit_code == 0, result.output
    results = {each["work"]: each for each in json.loads(result.stdout)["results"]}
    assert results["read, uniform"]["mover"] == "copy"
    assert results["read, uniform"]["ratio"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", 10**12], "pass --rows"),
        (["--batch", 10**12], "pass --batch"),
        (["--rows", 0], "--rows is 0"),
        (["x.npy", "--rows", 10], "with PATH"),
        (["missing.npy"], "missing.npy"),
        (["--device", "tpu"], "tpu"),
        (["--row-bytes", 0], "--row-bytes is 0"),
        (["--json", "nowhere/a.json"], "no folder"),
        (["--plot", "a.txt"], "png"),
        (["--compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    refused: Refused, words: list[object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused("bench", *words)


@pytest.mark.parametrize("text", ["no json", "[]", '{"program": "other"}', '{"program": "rowferry bench", "format": 99}'])
def test_only_records_of_this_command_are_compared(refused: Refused, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert "--json FILE" in refused("bench", "--compare", tmp_path / "a.json", tmp_path / "a.json")


def test_an_empty_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.zeros((0, 4)))
    assert "holds no bytes" in refused("bench", tmp_path / "e.npy")


@pytest.mark.gpu
def test_the_link_and_every_peer_are_measured_on_a_gpu(run: Run, tmp_path: Path) -> None:
    result = run("bench", "--quick", "--rows", 1_000_000, "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["limit"]["kind"] == "link"
    assert record["seconds"] < 30
    assert [each["work"] for each in record["results"] if "skipped" in each] == []
    assert next(each for each in record["results"] if each["work"] == "read, uniform")["mover"] == "zero-copy"
