"""Optimizer switchers: the state of a batch's rows, for every optimizer whose state is rows and numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import rowferry as rf
import rowferry.speedtorch as SpeedTorch

ROWS, WIDTH = 12, 3
Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, tuple[Make, list[str]]] = {
    "SparseAdam": (partial(torch.optim.SparseAdam, lr=0.05), ["exp_avg", "exp_avg_sq"]),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.05), ["sum"]),
    "Adam": (partial(torch.optim.Adam, lr=0.05), ["exp_avg", "exp_avg_sq"]),
    "Adam amsgrad": (partial(torch.optim.Adam, lr=0.05, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "AdamW foreach": (partial(torch.optim.AdamW, lr=0.05, foreach=True), ["exp_avg", "exp_avg_sq"]),
    "Adam fused": (partial(torch.optim.Adam, lr=0.05, fused=True), ["exp_avg", "exp_avg_sq"]),
    "NAdam": (partial(torch.optim.NAdam, lr=0.05), ["exp_avg", "exp_avg_sq"]),
    "RAdam": (partial(torch.optim.RAdam, lr=0.05), ["exp_avg", "exp_avg_sq"]),
    "Adamax": (partial(torch.optim.Adamax, lr=0.05), ["exp_avg", "exp_inf"]),
    "Adadelta": (partial(torch.optim.Adadelta, lr=0.5), ["acc_delta", "square_avg"]),
    "RMSprop": (partial(torch.optim.RMSprop, lr=0.05), ["square_avg"]),
    "RMSprop all": (
        partial(torch.optim.RMSprop, lr=0.05, momentum=0.9, centered=True),
        ["grad_avg", "momentum_buffer", "square_avg"],
    ),
    "ASGD": (partial(torch.optim.ASGD, lr=0.05, t0=2), ["ax"]),
    "Rprop": (partial(torch.optim.Rprop, lr=0.05), ["prev", "step_size"]),
    "SGD": (partial(torch.optim.SGD, lr=0.05), []),
    "SGD momentum": (partial(torch.optim.SGD, lr=0.05, momentum=0.9), ["momentum_buffer"]),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "OptimizerFactory": ("ModelFactory", {}),
    "OptimizerFactory pinned": ("ModelFactory", {"CPUPinn": True}),
    "OptimizerFactoryMM": ("ModelFactoryMM", {}),
    "GPUPytorchOptimizerFactory": ("GPUPytorchModelFactory", {}),
    "CPUPytorchOptimizerFactory": ("CPUPytorchModelFactory", {}),
    "PytorchOptimizerFactory": ("PytorchModelFactory", {}),
    "PytorchOptimizerFactory pinned": ("PytorchModelFactory", {"deviceType": "cpu", "pinType": True}),
}


class Net(nn.Module):
    """Two embeddings and a dense layer, so that the embedding is not alone in its optimizer."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 1)
        self.u = nn.Embedding(1, WIDTH, sparse=sparse)
        self.v = nn.Embedding(1, WIDTH, sparse=sparse)


def start() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def goal() -> torch.Tensor:
    return torch.cos(torch.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)


def loss_of(vectors: torch.Tensor, rows: Any) -> torch.Tensor:
    return (vectors - goal()[torch.as_tensor(rows)].to(vectors.device)).square().sum()


def filled(kind: str, model: Net, variable: str) -> Any:
    name, settings = KINDS[kind]
    table = getattr(SpeedTorch, name)(getattr(model, variable), ROWS, WIDTH, **settings)
    table.zerosInit()
    table._stores["weight"].scatter(range(ROWS), start())
    return table


def states(kind: str, optimizer: Optimizer, model: nn.Module, variable: str, **more: Any) -> Any:
    found = getattr(SpeedTorch, kind.partition(" ")[0])(optimizer, ROWS, WIDTH, model, variable, **KINDS[kind][1], **more)
    found.optInit()
    return found


def step(table: Any, state: Any, optimizer: Optimizer, rows: Any) -> None:
    table.beforeForwardPass(rows)
    state.beforeForwardPass(rows)
    optimizer.zero_grad()
    weight = table.model_variable.weight
    loss_of(
        nn.functional.embedding(torch.arange(len(rows), device=weight.device), weight, sparse=table.model_variable.sparse), rows
    ).backward()
    optimizer.step()
    table.afterOptimizerStep(rows)
    state.afterOptimizerStep(rows)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad sets it off
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_all_rows_is_training_an_ordinary_embedding(name: str, device: str) -> None:
    make, columns = OPTIMIZERS[name]
    model = Net(sparse=name in ("SparseAdam", "Adagrad")).to(device)
    optimizer = make([model.u.weight])
    table, state = filled("OptimizerFactory pinned", model, "u"), states("OptimizerFactory pinned", optimizer, model, "u")
    assert sorted(state.optVarList) == columns
    plain = nn.Parameter(start().to(model.u.weight.device))
    ordinary = make([plain])
    rng = np.random.default_rng(0)
    for _ in range(6):
        step(table, state, optimizer, rng.permutation(ROWS))
        ordinary.zero_grad()
        loss = loss_of(plain, range(ROWS))
        loss.backward()
        if name == "SparseAdam":
            assert plain.grad is not None
            plain.grad = plain.grad.to_sparse(1)
        ordinary.step()
    np.testing.assert_allclose(table.getNumpyVersion(), plain.detach().cpu().numpy(), rtol=2e-6, atol=1e-7)
    for column, found in zip(state.optVarList, state.getNumpyVersion(), strict=True):
        np.testing.assert_allclose(found, ordinary.state[plain][column].detach().cpu().numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Rprop"])
def test_training_some_rows_is_training_a_row_table(name: str, kind: str, device: str, folder: Path) -> None:
    make, _columns = OPTIMIZERS[name]
    model = Net().to(device)
    optimizer = make(model.parameters())
    table, state = filled(kind, model, "u"), states(kind, optimizer, model, "u")
    rng = np.random.default_rng(1)
    batches = [rng.permutation(ROWS)[: 3 + number % 4] for number in range(8)]
    for rows in batches:
        step(table, state, optimizer, rows)
    wanted = rf.RowTable(rf.PinnedStore.from_array(start()), make, device=model.u.weight.device)
    for batch, rows in zip(wanted.batches(batches), batches, strict=True):
        loss_of(batch.lookup(), rows).backward()
        batch.step()
    wanted.flush()
    np.testing.assert_allclose(table.getNumpyVersion(), wanted.weights.gather(slice(None)).numpy(), rtol=2e-6, atol=1e-7)
    for column, found in zip(state.optVarList, state.getNumpyVersion(), strict=True):
        np.testing.assert_allclose(found, wanted.state[column].gather(slice(None)).numpy(), rtol=1e-5, atol=1e-7)


def test_two_factories_share_an_optimizer_that_has_other_layers_too(device: str) -> None:
    model = Net().to(device)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1)
    tables = {name: filled("OptimizerFactory pinned", model, name) for name in ("u", "v")}
    kept = {name: states("OptimizerFactory pinned", optimizer, model, name) for name in ("u", "v")}
    assert [kept[name].optimizerKey for name in ("u", "v")] == [2, 3]
    dense = model.first.weight.detach().clone()
    rows = {"u": np.array([1, 2]), "v": np.array([3, 4, 5])}
    for _ in range(3):
        for name, at in rows.items():
            tables[name].beforeForwardPass(at)
            kept[name].beforeForwardPass(at)
        optimizer.zero_grad()
        (model.first(model.u.weight).sum() + model.v.weight.sum()).backward()
        optimizer.step()
        for name, at in rows.items():
            tables[name].afterOptimizerStep(at)
            kept[name].afterOptimizerStep(at)
    assert not torch.equal(model.first.weight, dense)
    for name, at in rows.items():
        changed = (tables[name].getNumpyVersion() != start().numpy()).any(1).nonzero()[0]
        assert changed.tolist() == at.tolist()
        assert kept[name].getNumpyVersion()[0][at].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Adam", "SparseAdam", "NAdam"])
def test_saved_state_is_resumed_in_a_new_process_s_optimizer(name: str, kind: str, device: str, folder: Path) -> None:
    make, columns = OPTIMIZERS[name]
    model = Net(sparse=name == "SparseAdam").to(device)
    optimizer = make([model.u.weight])
    table, state = filled(kind, model, "u"), states(kind, optimizer, model, "u")
    batches = [np.array([1, 5, 2]), np.array([5, 0]), np.array([2, 1, 5, 7])]
    for rows in batches[:2]:
        step(table, state, optimizer, rows)
    save, load, path = ("saveTorch", "loadTorch", "s.pt") if "Pytorch" in kind else ("saveCupy", "loadCupy", "s.npy")
    getattr(state, save)(path)
    weights, numbers = table.getNumpyVersion(), copy.deepcopy(optimizer.state_dict())
    step(table, state, optimizer, batches[2])

    other = Net(sparse=name == "SparseAdam").to(device)
    resumed = make([other.u.weight])
    again, loaded = filled(kind, other, "u"), states(kind, resumed, other, "u")
    again._stores["weight"].scatter(range(ROWS), weights)
    getattr(loaded, load)(path)
    resumed.load_state_dict(numbers)
    step(again, loaded, resumed, batches[2])
    np.testing.assert_array_equal(again.getNumpyVersion(), table.getNumpyVersion())
    assert len(loaded.getNumpyVersion()) == len(columns)
    if "Pytorch" not in kind:
        assert np.load("s.npy").shape == (len(columns), ROWS, WIDTH)


def test_state_that_was_loaded_before_any_step_counts(device: str, folder: Path) -> None:
    model = Net().to(device)
    state = states("OptimizerFactory pinned", torch.optim.Adam(model.parameters()), model, "u")
    np.save("s.npy", np.stack([np.full((ROWS, WIDTH), 2.0, np.float32), np.full((ROWS, WIDTH), 3.0, np.float32)]))
    state.loadCupy("s.npy")
    filled("OptimizerFactory pinned", model, "u").beforeForwardPass(np.array([4]))
    state.beforeForwardPass(np.array([4]))
    held = state.given_optimizer.state[model.u.weight]
    assert held["exp_avg"].tolist() == [[2.0] * WIDTH]
    assert held["exp_avg_sq"].tolist() == [[3.0] * WIDTH]
    assert (held["step"].item(), held["step"].dtype, held["step"].device.type) == (0, torch.float32, "cpu")


def test_half_precision_state_is_cast_to_the_parameters_dtype_and_back(device: str) -> None:
    model = Net().to(device)
    optimizer = torch.optim.Adam([model.u.weight])
    table = filled("OptimizerFactory pinned", model, "u")
    state = states("OptimizerFactory pinned", optimizer, model, "u", dtype="float16")
    step(table, state, optimizer, np.array([0, 3]))
    assert [array.dtype for array in state.getNumpyVersion()] == [np.float16, np.float16]
    assert optimizer.state[model.u.weight]["exp_avg"].dtype == torch.float32


def test_attributes_that_scripts_read(device: str, folder: Path) -> None:
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for kind, attribute in (
        ("OptimizerFactory", "CUPYcorpi"),
        ("OptimizerFactoryMM", "CUPYmemmap"),
        ("GPUPytorchOptimizerFactory", "pytorchGPUVar"),
        ("CPUPytorchOptimizerFactory", "pytorchCPUVar"),
    ):
        state = states(kind, optimizer, model, "u")
        assert [array.shape for array in getattr(state, attribute)] == [(ROWS, WIDTH)] * 2
        assert (state.optVarList, state.optimizerKey, state.variable_name) == (["exp_avg", "exp_avg_sq"], 2, "u")
    assert sorted(path.name for path in folder.iterdir()) == ["u0.memmap.exp_avg.cpy.npy", "u0.memmap.exp_avg_sq.cpy.npy"]


def test_adagrads_sums_begin_at_zero_as_they_did(device: str) -> None:
    model = Net().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert not states("OptimizerFactory", optimizer, model, "u").getNumpyVersion()[0].any()


def test_what_cannot_be_swapped_is_refused_by_name(device: str) -> None:
    model = Net().to(device)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(KeyError, match=r"no variable 'w'; it has .*u\.weight"):
        SpeedTorch.OptimizerFactory(adam, ROWS, WIDTH, model, "w")
    with pytest.raises(ValueError, match="embed_dimension is 4"):
        SpeedTorch.OptimizerFactory(adam, ROWS, 4, model, "u")
    with pytest.raises(ValueError, match="does not hold u"):
        SpeedTorch.OptimizerFactory(torch.optim.Adam([model.v.weight]), ROWS, WIDTH, model, "u")
    with pytest.raises(TypeError, match="Adafactor"):
        SpeedTorch.OptimizerFactory(torch.optim.Adafactor(model.parameters()), ROWS, WIDTH, model, "u")
    with pytest.raises(RuntimeError, match="holds nothing yet"):
        SpeedTorch.OptimizerFactory(adam, ROWS, WIDTH, model, "u").beforeForwardPass(np.array([0]))
    wrapped = nn.ModuleDict({"module": model})
    assert SpeedTorch.OptimizerFactory(adam, ROWS, WIDTH, wrapped, "u").optimizerKey == 2
