"""Run commands, and read what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from rowferry.cli import app

Run = Callable[..., Result]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("inspect", path)``: the finished command, on a wide screen so that no line is wrapped."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def ask(run: Run) -> Ask:
    """``ask("inspect", path)``: what the command says with ``--json``; it must succeed and say nothing else."""

    def asked(*words: object) -> dict[str, Any]:
        result = run(*words, "--json")
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        assert result.stdout.count("\n") == 1
        answer = json.loads(result.stdout)
        assert isinstance(answer, dict)
        return answer

    return asked


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """``refused("inspect", path)``: the one line that the command says on stderr when it ends with exit code 2."""

    def line(*words: object) -> str:
        result = run(*words)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
        return result.stderr

    return line


@pytest.fixture
def rows() -> NDArray[np.float32]:
    """1,000 rows of 128 float32, row i filled with i."""
    return np.repeat(np.arange(1000, dtype=np.float32)[:, None], 128, axis=1)


@pytest.fixture
def npy(tmp_path: Path, rows: NDArray[np.float32]) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, rows)
    return path
