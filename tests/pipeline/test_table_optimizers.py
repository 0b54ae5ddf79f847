"""Every optimizer, on batches of changing size: a RowTable ends where the plain loop over a full table in memory ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn.functional import embedding

from rowferry.pipeline import RowTable
from rowferry.stores import ArrayStore, PinnedStore, create_store

# torch's own sparse optimizers say this once a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS, WIDTH = 60, 5

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adam": (optim.Adam, {"lr": 0.05}),
    "Adam amsgrad, weight decay": (optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.01}),
    "Adam maximize": (optim.Adam, {"lr": 0.05, "maximize": True}),
    "AdamW": (optim.AdamW, {"lr": 0.05}),
    "AdamW fused": (optim.AdamW, {"lr": 0.05, "fused": True, "amsgrad": True}),
    "AdamW foreach": (optim.AdamW, {"lr": 0.05, "foreach": True}),
    "Adamax": (optim.Adamax, {"lr": 0.05}),
    "NAdam": (optim.NAdam, {"lr": 0.05, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"lr": 0.05}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "RMSprop": (optim.RMSprop, {"lr": 0.02}),
    "RMSprop momentum, centered": (optim.RMSprop, {"lr": 0.02, "momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.02}),
    "ASGD": (optim.ASGD, {"lr": 0.05, "t0": 5}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3, "lr_decay": 0.01}),
    "Adagrad fused": (optim.Adagrad, {"lr": 0.1, "fused": True}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum, dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SparseAdam": (optim.SparseAdam, {"lr": 0.05}),
}
CPU_ONLY = frozenset({"Adagrad fused"})  # torch has no such kernel for CUDA
CUDA_ONLY: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adam fused, capturable": (optim.Adam, {"lr": 0.05, "fused": True, "capturable": True}),
    "Adam foreach, capturable": (optim.Adam, {"lr": 0.05, "foreach": True, "capturable": True, "amsgrad": True}),
    "NAdam capturable": (optim.NAdam, {"lr": 0.05, "capturable": True}),
    "SGD fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


def index_batches(count: int, seed: int) -> list[Tensor]:
    """Batches of 0 to 40 ids, some of them often, in one or two dimensions."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(count):
        size = 0 if number == 7 else int(torch.randint(1, 41, (), generator=generator))
        skewed = torch.rand(size, generator=generator) ** 3 * ROWS
        batches.append(skewed.long().view(-1, 2) if size % 2 == 0 and number % 3 == 0 else skewed.long())
    return batches


def targets(ids: Tensor) -> Tensor:
    return torch.sin(ids[..., None] * torch.arange(1, WIDTH + 1, device=ids.device))


def loss_of(vectors: Tensor, ids: Tensor) -> Tensor:
    return ((vectors - targets(ids)) ** 2).sum()


def as_sparse(gradient: Tensor) -> Tensor:
    rows = torch.arange(len(gradient), device=gradient.device)
    return torch.sparse_coo_tensor(rows[None], gradient, gradient.shape, check_invariants=False)


def plain_loop(
    weights: Tensor, kind: type[optim.Optimizer], settings: dict[str, Any], batches: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Read, step, write, on full tables: weights, columns of state, scalars after it.

    The first step makes its own state; rows that no step has met hold what it began with: zeros, but for ``INITIAL``.
    """
    full = weights.clone()
    columns: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    started = False
    for ids in batches:
        ids = ids.to(full.device)
        rows, inverse = torch.unique(ids, return_inverse=True)
        if not len(rows):
            continue
        leaf = full[rows].requires_grad_()
        optimizer = kind([leaf], **settings)
        if started:
            optimizer.state[leaf] = {**{name: value[rows] for name, value in columns.items()}, **scalars}
        loss_of(embedding(inverse, leaf), ids).backward()
        if kind is optim.SparseAdam:
            assert leaf.grad is not None
            leaf.grad = as_sparse(leaf.grad)
        optimizer.step()
        full[rows] = leaf.detach()
        for name, value in optimizer.state[leaf].items():
            if isinstance(value, Tensor) and value.dim():
                initial = initial_value(kind, name, settings)
                columns.setdefault(name, torch.full_like(full, initial))[rows] = value
            elif value is not None:
                scalars[name] = value
        started = True
    return full, columns, scalars


def initial_value(kind: type[optim.Optimizer], name: str, settings: dict[str, Any]) -> float:
    if kind is optim.Rprop and name == "step_size":
        return float(settings["lr"])
    if kind is optim.Adagrad and name == "sum":
        return float(settings.get("initial_accumulator_value", 0.0))
    return 0.0


def train(table: RowTable, batches: list[Tensor], **moving: Any) -> None:
    for batch in table.batches(batches, **moving):
        loss_of(embedding(batch.inverse, batch.weight), batch.index).backward()
        batch.step()
    table.flush()


def check(name: str, table: RowTable, wanted: tuple[Tensor, dict[str, Tensor], dict[str, Any]]) -> None:
    weights, columns, scalars = wanted
    torch.testing.assert_close(table.weights.gather(range(ROWS)), weights.cpu(), rtol=1e-6, atol=1e-6)
    assert set(table.state) == set(columns), name
    for column, value in columns.items():
        torch.testing.assert_close(table.state[column].gather(range(ROWS)), value.cpu(), rtol=1e-6, atol=1e-6)
    assert {key: float(value) for key, value in table.scalars.items()} == {key: float(value) for key, value in scalars.items()}


@pytest.mark.parametrize("moving", [{"mover": "local"}, {"mover": "copy", "lookahead": 5}], ids=["local", "windows"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_end_where_the_plain_loop_ends(name: str, moving: dict[str, Any]) -> None:
    kind, settings = OPTIMIZERS[name]
    weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    batches = index_batches(50, seed=len(name))
    table = RowTable(ArrayStore(weights.clone()), kind, settings, device="cpu")
    train(table, batches, staging_bytes=1 << 20, **moving)
    check(name, table, plain_loop(weights, kind, settings, batches))


@pytest.mark.gpu
@pytest.mark.parametrize("mover", ["auto", "copy"])
@pytest.mark.parametrize("name", [name for name in (*OPTIMIZERS, *CUDA_ONLY) if name not in CPU_ONLY])
def test_fifty_steps_on_a_gpu_end_where_the_plain_loop_ends(name: str, mover: Any) -> None:
    kind, settings = {**OPTIMIZERS, **CUDA_ONLY}[name]
    weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    batches = index_batches(50, seed=len(name))
    table = RowTable(PinnedStore.from_array(weights), kind, settings, device="cuda")
    train(table, batches, mover=mover, lookahead=5, staging_bytes=1 << 20)
    check(name, table, plain_loop(weights.cuda(), kind, settings, batches))


@pytest.mark.parametrize("suffix", ["npy", "zarr"])
@pytest.mark.parametrize("name", ["AdamW", "Rprop"])
def test_weights_and_state_in_files_end_the_same(name: str, suffix: str, tmp_path: Any) -> None:
    kind, settings = OPTIMIZERS[name]
    weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    with create_store(tmp_path / f"w.{suffix}", (ROWS, WIDTH), torch.float32) as store:
        store.copy_from(ArrayStore(weights))
    batches = index_batches(20, seed=1)
    table = RowTable(tmp_path / f"w.{suffix}", kind, settings, state="like weights", device="cpu")
    train(table, batches, staging_bytes=1 << 20)
    check(name, table, plain_loop(weights, kind, settings, batches))
    files = {path.name for path in tmp_path.iterdir() if path.suffix != ".redo"}  # what is beside an open .npy
    assert files == {f"w.{suffix}", *(f"w.{column}.{suffix}" for column in table.state)}


@pytest.mark.parametrize(
    ("kind", "settings"), [(optim.SparseAdam, {"lr": 0.05}), (optim.Adagrad, {"lr": 0.1}), (optim.SGD, {"lr": 0.1})]
)
def test_torchs_own_sparse_embedding_ends_at_the_same_rows(kind: type[optim.Optimizer], settings: dict[str, Any]) -> None:
    weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    layer = torch.nn.Embedding(ROWS, WIDTH, sparse=True, _weight=weights.clone())
    reference = kind(layer.parameters(), **settings)
    batches = [ids for ids in index_batches(50, seed=9) if ids.numel()]
    for ids in batches:
        reference.zero_grad()
        loss_of(layer(ids), ids).backward()
        reference.step()
    table = RowTable(weights.clone(), kind, settings, device="cpu")
    train(table, batches)
    torch.testing.assert_close(table.lookup(range(ROWS)), layer.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [optim.Adafactor, getattr(optim, "Muon", optim.Adafactor), optim.LBFGS])
def test_optimizers_that_are_not_row_by_row_are_refused_by_name(kind: type[optim.Optimizer]) -> None:
    with pytest.raises(TypeError, match=kind.__name__):
        RowTable(torch.zeros(4, 2), kind)
    make: Any = kind
    existing = make([torch.zeros(2, 2, requires_grad=True)])
    with pytest.raises(TypeError, match=kind.__name__):
        RowTable(torch.zeros(4, 2), existing)


class Odd(optim.SGD):
    """Keeps state that is neither a value a row nor one of the table."""

    def __init__(self, params: Any, state: Callable[[Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self._of = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["odd"] = self._of(param)
        super().step(closure)


@pytest.mark.parametrize("odd", [lambda param: torch.zeros(1, 5), lambda param: "text", lambda param: param.detach().T.clone()])
def test_state_that_no_column_can_hold_is_refused_by_name_before_training(odd: Callable[[Tensor], Any]) -> None:
    table = RowTable(torch.zeros(4, 5), lambda params: Odd(params, odd), device="cpu")
    with pytest.raises(TypeError, match="'odd'"):
        table.batches([[0]])


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer is a str"):
        RowTable(torch.zeros(4, 5), "Adam")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="made a list"):
        RowTable(torch.zeros(4, 5), lambda params: params)
