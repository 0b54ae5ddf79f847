"""The benchmarks that run SpeedTorch's figures again work at a size that a small machine bears."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def record_of(name: str, folder: Path, device: str) -> Any:
    arguments = ["--smoke", "--rows-gib", "0.002", "--runs", "1", "--json", "--out", str(folder), "--device", device]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert json.loads((folder / f"{name}.json").read_text()) == record
    assert record["complete"]
    return record


def test_the_tables_have_every_cell(folder: Path, device: str) -> None:
    results = record_of("speedtorch_tables", folder, device)["results"]
    cells = {(each["work"], each["repeats"], each.get("index")) for each in results if "repeats" in each}
    for store in ("SpeedTorch cuda", "SpeedTorch pinned CPU", "PyTorch cuda", "PyTorch pinned CPU"):
        assert {(store, repeats, index) for repeats in (True, False) for index in ("host", "device")} <= cells
    work = {each["work"] for each in results}
    assert {"the link alone", "optimizer state, cuda", "optimizer state, pinned CPU"} <= work
    assert {"read a step, prefetch", "read and write a step, prefetch", "memory of SpeedTorch pinned CPU"} <= work
    assert ("CuPy a[index] over pinned memory" in work) == (device == "cuda")
    assert all(each["to_ms"] > 0 and each["from_ms"] > 0 for each in results if "to_ms" in each)


def test_the_widest_embedding_trains_by_both_optimizers(folder: Path, device: str) -> None:
    results = record_of("widest_embedding", folder, device)["results"]
    assert [(each["work"], each["width"]) for each in results] == [("Adagrad", 4), ("SGD", 3)]
    for each in results:
        assert each["ms_a_step"] > 0
        assert ("widest_on_the_device" in each) == (device == "cuda")
        assert each["device_peak_bytes"]["reserved"] <= 11_170_000_000
        assert each["pinned_bytes"] == (2 if each["work"] == "SGD" else 4) * each["rows"] * each["width"] * 4


CUT_OFF = """
from _speedtorch import finish

def measure(options):
    yield {"work": "done"}
    raise SystemExit("cut off")

finish("tables", "", measure)
"""


def test_a_run_that_is_cut_off_leaves_what_it_has(tmp_path: Path) -> None:
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-c", CUT_OFF, "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert "cut off" in done.stderr
    record = json.loads((tmp_path / "tables.json").read_text())
    assert (record["complete"], record["results"]) == (False, [{"work": "done"}])
