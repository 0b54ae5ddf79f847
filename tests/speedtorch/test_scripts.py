"""Whole scripts as people wrote them run with no line changed, and compute what SpeedTorch computed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import rowferry.speedtorch as SpeedTorch
from rowferry.speedtorch.__main__ import MODULES, MissingCupy, main

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
SMALL = {
    "two_tables": (["300", "8", "25", "6"], ("u_final.npy", "v.cpy.npy", "losses.npy")),
    "adagrad_state": (["200", "8", "25", "6"], ("given.npy", "context.npy", "losses.npy", "sums.npy")),
}


def run(*arguments: str, folder: Path, warnings: str = "error") -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-W", warnings, "-m", "rowferry.speedtorch", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


class Slots:
    """SpeedTorch's own way for one array: rows go to the slots, and come back, the last of a row that has several."""

    def __init__(self, given: Any, rows: int, width: int) -> None:
        self.given, self.table = given, torch.zeros(rows, width)

    @staticmethod
    def flat(pos: Any, neg: Any) -> Any:
        return pos.reshape(-1) if neg is None else np.concatenate([pos.reshape(-1), neg.reshape(-1)])

    def take(self, pos: Any, neg: Any) -> torch.Tensor:
        return self.table[torch.from_numpy(self.flat(pos, neg)).long()]

    def put(self, pos: Any, neg: Any, values: torch.Tensor) -> None:
        for row, value in zip(self.flat(pos, neg).tolist(), values, strict=True):
            self.table[row] = value


class Weights(Slots):
    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = None, CPUPinn: bool = False
    ):
        super().__init__(model_variable, total_classes, embed_dimension)
        del datatype, CPUPinn

    def zerosInit(self) -> None:
        self.table.zero_()

    def uniformDistributionInit(self, low: float, high: float) -> None:
        torch.nn.init.uniform_(self.table, low, high)

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        torch.nn.init.normal_(self.table, mean, stdDev)

    def variableTransformer(self, batch: int, pos: int, neg: int | None = None) -> Any:
        positive = np.arange(batch * pos).reshape(batch, pos)
        return positive if neg is None else (positive, np.arange(batch * neg).reshape(batch, neg) + batch * pos)

    def beforeForwardPass(self, pos: Any, neg: Any = None) -> None:
        self.given.weight.data = self.take(pos, neg)

    def afterOptimizerStep(self, pos: Any, neg: Any = None) -> None:
        self.put(pos, neg, self.given.weight.data)

    def getNumpyVersion(self) -> Any:
        return self.table.numpy().copy()

    def saveCupy(self, name: str) -> None:
        np.save(name, self.table.numpy())

    def saveTorch(self, name: str) -> None:
        torch.save(self.table, name)


class Sums(Slots):
    def __init__(self, optimizer: Any, rows: int, width: int, model: Any, name: str, dtype: Any = None, CPUPinn: bool = False):
        super().__init__(optimizer, rows, width)
        self.state = optimizer.state[getattr(model, name).weight]
        del dtype, CPUPinn

    def optInit(self) -> None:
        self.table.zero_()

    @property
    def CUPYcorpi(self) -> Any:
        return [self.table.numpy()]

    def beforeForwardPass(self, pos: Any, neg: Any = None) -> None:
        self.state["sum"] = self.take(pos, neg)

    def afterOptimizerStep(self, pos: Any, neg: Any = None) -> None:
        self.put(pos, neg, self.state["sum"])


@pytest.fixture
def speedtorchs_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, list[str]], Path]:
    """``speedtorchs_way(script, arguments)``: the folder of what it writes when its rows go the way that they went."""

    def ran(script: str, arguments: list[str]) -> Path:
        module: Any = ModuleType("SpeedTorch")
        module.ModelFactory = module.GPUPytorchModelFactory = Weights
        module.OptimizerFactory, module.COM = Sums, SpeedTorch.COM
        for name in ("SpeedTorch", *(f"SpeedTorch.{each}" for each in MODULES)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "cupy", MissingCupy("cupy"))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        folder = tmp_path / "reference"
        folder.mkdir()
        monkeypatch.chdir(folder)
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return folder

    return ran


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad sets it off
@pytest.mark.skipif(torch.cuda.is_available(), reason="the numbers of a GPU are not those of a CPU to the last bit")
@pytest.mark.parametrize("name", SMALL)
def test_a_script_computes_what_it_computed(name: str, folder: Path, speedtorchs_way: Callable[[str, list[str]], Path]) -> None:
    arguments, files = SMALL[name]
    done = run(str(SCRIPTS / f"{name}.py"), *arguments, folder=folder, warnings="ignore")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, last = map(float, done.stdout.split()[1:])
    assert last < first
    reference = speedtorchs_way(f"{name}.py", arguments)
    for file in files:
        np.testing.assert_array_equal(np.load(folder / file), np.load(reference / file), err_msg=file)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_a_script_runs_on_a_gpu(name: str, folder: Path) -> None:
    arguments, files = SMALL[name]
    done = run(str(SCRIPTS / f"{name}.py"), "20000", "64", "100", "64", folder=folder, warnings="ignore")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert all(np.isfinite(np.load(folder / file)).all() for file in files)
    del arguments


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_adagrad_without_repeats_is_an_ordinary_sparse_embedding(device: str) -> None:
    rows, width = 60, 5
    ordinary = torch.nn.Embedding(rows, width, sparse=True).to(device)
    of_all = torch.optim.Adagrad(ordinary.parameters(), lr=0.1)
    net = torch.nn.ModuleDict({"e": torch.nn.Embedding(1, width, sparse=True)}).to(device)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    table: Any = SpeedTorch.ModelFactory(net["e"], rows, width, CPUPinn=True)
    table.zerosInit()
    table._stores["weight"].scatter(range(rows), ordinary.weight.detach().clone())
    state = SpeedTorch.OptimizerFactory(optimizer, rows, width, net, "e", CPUPinn=True)
    state.optInit()
    slots = [torch.from_numpy(each).to(device) for each in table.variableTransformer(4, 1, 3)]
    rng = np.random.default_rng(0)
    for _ in range(10):
        drawn = rng.permutation(rows)[:16]
        index = [drawn[:4].reshape(4, 1), drawn[4:].reshape(4, 3)]
        for what in (table, state):
            what.beforeForwardPass(*index)
        ids = [torch.from_numpy(each).to(device) for each in index]
        for embedding, at, optim in ((net["e"], slots, optimizer), (ordinary, ids, of_all)):
            optim.zero_grad()
            (embedding(at[0]) * embedding(at[1])).sum().square().backward()
            optim.step()
        for what in (table, state):
            what.afterOptimizerStep(*index)
    np.testing.assert_allclose(table.getNumpyVersion(), ordinary.weight.detach().cpu().numpy(), rtol=1e-5, atol=1e-6)
    sums = of_all.state[ordinary.weight]["sum"].cpu().numpy()
    np.testing.assert_allclose(state.getNumpyVersion()[0], sums, rtol=1e-5, atol=1e-7)


# ---- the runner -----------------------------------------------------------------------------------------------------


def test_a_script_gets_its_arguments_its_folder_and_every_module(folder: Path) -> None:
    (folder / "beside.py").write_text("word = 'beside'\n")
    (folder / "script.py").write_text(
        "import sys\nimport SpeedTorch\nfrom SpeedTorch.GenTorch import PytorchCOM\nfrom beside import word\n"
        "assert __name__ == '__main__'\nprint(sys.argv[1:], word, SpeedTorch.PytorchCOM is PytorchCOM)\n"
    )
    done = run("script.py", "--rows", "5", folder=folder)
    assert (done.stdout, done.stderr, done.returncode) == ("['--rows', '5'] beside True\n", "", 0)


def test_what_a_script_ends_with_is_passed_on(folder: Path) -> None:
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "fails.py").write_text("raise KeyError('which')\n")
    assert run("exits.py", folder=folder).returncode == 3
    done = run("fails.py", folder=folder)
    assert done.returncode == 1
    assert "KeyError: 'which'" in done.stderr


def test_without_a_script_it_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().err.count("usage: python -m rowferry.speedtorch script.py") == 2


def test_a_script_that_uses_cupy_is_told_that_it_is_missing() -> None:
    with pytest.raises(AttributeError, match=r"uses cupy.zeros, and CuPy is not installed"):
        _ = MissingCupy("cupy").zeros
    assert not isinstance(np.zeros(1), MissingCupy("cupy").ndarray)
