"""The examples run, in small, and find what they say they find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = {
    "word2vec": ["--batches", "60", "--batch", "256", "--bytes", "400000", "--width", "16", "--least", "3"],
    "neural_cf": ["--files", "1500", "--epochs", "10", "--batch", "128", "--least", "3"],
}


def run(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints; warnings are errors, as in the tests."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *SMALL[name], *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_word2vec_in_host_memory_learns_as_on_the_device_and_prints_neighbours() -> None:
    lines = run("word2vec", "--device", "cpu")
    assert lines[-1].startswith("word2vec ok: loss")
    assert any(line.startswith("near license: ") for line in lines)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("batch ")]
    assert losses[-1] < losses[0]


def test_neural_collaborative_filtering_beats_popularity() -> None:
    lines = run("neural_cf", "--device", "cpu")
    assert lines[-1].startswith("neural_cf ok: ")
    assert lines[1].startswith("epoch 0: loss")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_the_examples_run_on_a_gpu(name: str) -> None:
    assert run(name, "--device", "cuda")[-1].startswith(f"{name} ok: ")
