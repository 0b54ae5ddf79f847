"""The programs in ``benchmarks/`` run on a machine without a GPU, in small, check their values, and write a result file."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("reading", "writing", "overlap", "training_step", "cpu", "small_batches", "peers", "bare_engine")
SMALL = ("--device", "cpu", "--smoke", "--rows-gib", "0.002", "--runs", "1")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], dict[str, object]]]:
    """``program("reading")``: the result file that the program writes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(PROGRAMS))

    def run(name: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", [name, *SMALL, "--out", str(tmp_path)])
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
        found: dict[str, object] = json.loads((tmp_path / f"{name}.json").read_text())
        return found

    yield run
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:  # those beside the programs have common names
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PROGRAMS)):
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_program_runs_in_small_and_keeps_what_it_ran_on(
    program: Callable[[str], dict[str, object]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = program(name)
    assert record["benchmark"] == name
    assert record["results"]
    machine = record["machine"]
    assert isinstance(machine, dict)
    assert machine["cores"] >= 1
    assert capsys.readouterr().out.count("work=") == len(record["results"])  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this one is about machines without a GPU")
def test_a_program_that_needs_a_gpu_says_how_to_run_it_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setattr(sys, "argv", ["reading"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAMS / "reading.py"), run_name="__main__")
    assert "--device cpu" in capsys.readouterr().err
