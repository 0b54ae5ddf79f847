"""The whole mixed-precision comparison, in small and on a CPU: its output, and what is left of it when it is cut off."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mixed_precision
import numpy as np
import pytest
import torch
from _mixed import text
from _mixed.precision import NAMES
from rich.console import Console

ROOT = Path(__file__).parents[1]
PROGRAM = (str(ROOT / "benchmarks" / "mixed_precision.py"),)
CPU = torch.device("cpu")
SMALL = {
    "images": ["--images", "64", "--size", "16", "--width", "4", "--image-batch", "32"],
    "text": ["--text-bytes", "5000", "--length", "32", "--hidden", "16", "--text-batch", "16"],
}


def compare(out: Path, *arguments: str, program: tuple[str, ...] = PROGRAM, code: int = 0) -> str:
    """What the program prints, warnings being errors."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-W", "error", *program, "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}  # spinning threads are slow
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_comparison_runs_on_a_cpu_and_says_what_it_trained_with(tmp_path: Path) -> None:
    printed = compare(
        tmp_path, "--device", "cpu", "--models", "resnet18,lstm", "--epochs", "1", *SMALL["images"], *SMALL["text"]
    )
    assert "synthetic" in printed
    assert "real text" in printed
    assert "1.13 to 1.18" in printed
    record = json.loads((tmp_path / "mixed_precision.json").read_text())
    found = {(each["model"], each["precision"]): each for each in record["results"]}
    assert set(found) == {(model, precision) for model in ("resnet18", "lstm") for precision in NAMES}
    for each in found.values():
        assert np.isfinite([each["train_loss"], each["test_loss"], each["seconds_an_epoch"], each["times_faster"]]).all()
        assert each["training_seconds"] > each["seconds_an_epoch"]
        assert each["largest_batch"] is None
    assert record["complete"]
    assert (tmp_path / "mixed_precision.png").read_bytes().startswith(b"\x89PNG")


def test_one_language_model_is_trained_in_float16_by_a_switch_and_speaks_json(tmp_path: Path) -> None:
    printed = compare(tmp_path, "--device", "cpu", "--models", "elman", "--fp16", "--epochs", "1", *SMALL["text"], "--json")
    record = json.loads(printed)
    assert record == json.loads((tmp_path / "mixed_precision.json").read_text())
    assert str(tmp_path) not in printed  # a record may be published
    assert record["command"].startswith("python benchmarks/mixed_precision.py --device cpu --models elman")
    assert [(each["model"], each["precision"]) for each in record["results"]] == [("elman", "half")]


# The program, killed when it begins to train by autocast.
CUT_OFF = """
import os, signal, mixed_precision

whole = mixed_precision.train

def train(task, precision, device, epochs):
    if precision == "autocast":
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(task, precision, device, epochs)

mixed_precision.train = train
mixed_precision.main()
"""


def test_a_run_that_is_cut_off_can_be_drawn_and_ended_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(*given: str) -> tuple[int, str]:
        """Exit status and what is printed, without a process of its own."""
        monkeypatch.setattr(sys, "argv", ["mixed_precision.py", "--out", str(tmp_path), *given])
        return mixed_precision.main(), " ".join(capsys.readouterr().out.split())

    path, chart = tmp_path / "mixed_precision.json", tmp_path / "mixed_precision.png"
    arguments = ["--device", "cpu", "--models", "elman", "--epochs", "1", *SMALL["text"]]
    status, printed = here("--draw")
    assert (status, "mixed_precision.json does not exist" in printed) == (2, True)
    compare(tmp_path, *arguments, "--merge", program=("-c", CUT_OFF), code=-signal.SIGKILL)
    left = json.loads(path.read_text())
    assert [each["precision"] for each in left["results"]] == ["fp32"]
    assert not left["complete"]
    assert not chart.exists()

    status, printed = here("--draw")
    assert status == 0
    assert "still to be measured: elman autocast, elman half" in printed
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.read_text()) == left

    compare(tmp_path, *arguments, "--merge", "--precisions", "autocast,half")
    ended = json.loads(path.read_text())
    assert ended["complete"]
    assert ended["results"][0] == left["results"][0]
    assert [each["precision"] for each in ended["results"]] == list(NAMES)

    status, printed = here(*arguments, "--merge", "--hidden", "8")
    assert status == 2
    assert "hidden is 16 there and 8 here" in printed
    assert json.loads(path.read_text()) == ended


class Room:
    """A pretence of a GPU's memory in which ``most`` rows find room."""

    def __init__(self, most: int) -> None:
        self.limit, self.most, self.rows = most * 1_000, most, 0

    @contextmanager
    def limited(self) -> Iterator[None]:
        yield

    def clear(self) -> None:
        self.rows = 0

    def peak(self) -> int:
        return self.rows * 1_000


class Roomy(text.TextTask):
    """Asks a ``Room`` whether its random batches find room."""

    room: Room
    mistake = ""

    def random(self, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        if self.mistake:
            raise RuntimeError(self.mistake)
        if batch > self.room.most:
            raise torch.OutOfMemoryError("as CUDA does")
        self.room.rows = batch
        return super().random(1, dtype, device)


def searching(folder: Path, room: Room, mistake: str = "") -> tuple[list[dict[str, Any]], str]:
    """Results of a comparison with a pretence of a GPU, and what it says."""
    text.write(folder, None, 3_000, 16)
    task = Roomy("elman", folder, 8, 16, 4, 1)
    object.__setattr__(task, "room", room)
    object.__setattr__(task, "mistake", mistake)
    options, screen = argparse.Namespace(precisions=["fp32"], epochs=1), io.StringIO()
    found = mixed_precision.compared(options, [task], CPU, room, Console(file=screen, width=200))
    return list(found), screen.getvalue()


def test_a_result_is_there_after_its_training_and_again_with_its_largest_batch(tmp_path: Path) -> None:
    (trained, found), said = searching(tmp_path, Room(300))
    assert (trained["complete"], trained["largest_batch"]) == (False, None)
    assert (found["complete"], found["largest_batch"], found["too_large"], found["guess"]) == (True, 296, 304, 300)
    assert found["memory_limit"] == 300_000
    assert found["train_loss"] == trained["train_loss"]
    assert "largest batch 296, by 4 trials from a guess of 300" in said


def test_a_search_that_fails_is_told_and_the_training_kept(tmp_path: Path) -> None:
    (trained, found), said = searching(tmp_path, Room(300), "a mistake")
    assert found == {**trained, "search_error": "RuntimeError: a mistake"}
    assert "failed: RuntimeError: a mistake" in said


@pytest.mark.gpu
def test_on_a_gpu_the_largest_batch_grows_with_float16(tmp_path: Path) -> None:
    arguments = ["--models", "resnet18,lstm", "--memory-gb", "1", "--epochs", "2", "--images", "2000"]
    record = json.loads(compare(tmp_path, *arguments, "--text-bytes", "200000", "--json"))
    low = [each for each in record["results"] if each["precision"] != "fp32"]
    assert len(low) == 4
    assert all(each["times_the_batch"] > 1.3 for each in low)
    assert all(each["trials"] <= 10 for each in record["results"])
