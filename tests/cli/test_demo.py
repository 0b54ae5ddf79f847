"""``rowferry demo`` trains from .npy and .zarr through the pipeline and says whether that worked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from typer.testing import Result

Run = Callable[..., Result]


def test_both_formats_train_the_same_classifier_and_the_last_line_says_so(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--dir", tmp_path / "data", "--device", "cpu")
    assert result.exit_code == 0, result.output
    *table, last = result.stdout.splitlines()
    found = re.fullmatch(r"demo ok: npy accuracy (0\.\d{3}), zarr accuracy (0\.\d{3})", last)
    assert found, last
    # The same rows in the same order, bit for bit, so the same training.
    assert found[1] == found[2]
    for heading in ("store", "device", "test accuracy", "rows/s", "consumer waited"):
        assert heading in "\n".join(table)


def test_the_files_are_a_real_npy_and_a_sharded_zarr(run: Run, tmp_path: Path) -> None:
    run("demo", "--dir", tmp_path, "--epochs", 1, "--device", "cpu")
    pixels, labels = np.load(tmp_path / "digits-train-x.npy"), np.load(tmp_path / "digits-train-y.npy")
    assert (pixels.dtype, pixels.shape[1:], labels.dtype, labels.ndim) == (np.float32, (64,), np.int64, 1)
    assert len(pixels) + len(np.load(tmp_path / "digits-test-x.npy")) == 1797
    array = zarr.open_array(tmp_path / "digits-train-x.zarr", mode="r")
    assert array.shards is not None
    np.testing.assert_array_equal(array[:], pixels)


def test_a_second_run_keeps_the_files_and_gives_the_same_result(run: Run, tmp_path: Path) -> None:
    words = ("demo", "--dir", tmp_path, "--epochs", 1, "--device", "cpu", "--json")
    first = json.loads(run(*words).stdout)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = json.loads(run(*words).stdout)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert first["npy"]["accuracy"] == second["npy"]["accuracy"] == second["zarr"]["accuracy"]


def test_too_little_training_fails_the_demo(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--dir", tmp_path, "--epochs", 1, "--device", "cpu")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("demo failed: npy accuracy 0.")
    as_json = run("demo", "--dir", tmp_path, "--epochs", 1, "--device", "cpu", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["ok"] is False


def test_a_file_of_the_same_name_that_holds_something_else_is_refused_and_kept(
    run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "digits-train-x.npy"
    np.save(path, np.arange(3))
    assert str(path) in refused("demo", "--dir", tmp_path)
    np.testing.assert_array_equal(np.load(path), np.arange(3))


def test_without_scikit_learn_one_line_names_the_extra(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "rowferry[demo]" in refused("demo", "--dir", tmp_path)


def test_the_demo_leaves_the_random_state_of_its_process_alone(run: Run, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run("demo", "--dir", tmp_path, "--epochs", 1, "--device", "cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_the_demo_passes_on_the_gpu(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--dir", tmp_path)
    assert result.exit_code == 0, result.output
    assert "cuda:0" in result.stdout
