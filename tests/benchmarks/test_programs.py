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
NAMES = (
    "reading",
    "writing",
    "overlap",
    "training_step",
    "cpu",
    "small_batches",
    "peers",
    "bare_engine",
    "speedtorch_tables",
    "widest_embedding",
    "zarr_reading",
    "beside_disk",
)
SMALL = ("--smoke", "--rows-gib", "0.002", "--runs", "1")
Program = Callable[..., dict[str, object]]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Program]:
    """``program("reading", "cpu")``: the result file that the program writes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(PROGRAMS))

    def run(name: str, device: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", [name, *SMALL, "--device", device, "--out", str(tmp_path), "--folder", str(tmp_path)])
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
        found: dict[str, object] = json.loads((tmp_path / f"{name}.json").read_text())
        return found

    yield run
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:  # those beside the programs have common names
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PROGRAMS)):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad sets it off
@pytest.mark.parametrize("name", NAMES)
def test_every_program_runs_in_small_and_keeps_what_it_ran_on(
    program: Program, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = program(name, "cpu")
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


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_kernel_of_the_bare_engine_compiles(compile_cuda: Callable[..., str], architecture: str) -> None:
    source = runpy.run_path(str(PROGRAMS / "_bare.py"))["_SOURCE"]
    assert compile_cuda(source, architecture, "--std=c++17") == ""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_program_runs_in_small_on_a_gpu(program: Program, name: str) -> None:
    assert program(name, "cuda")["results"]
