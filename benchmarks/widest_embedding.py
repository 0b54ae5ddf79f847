"""How wide an embedding fits: SpeedTorch's headline, on a GPU that is limited to the memory that theirs had.

Two tables and their optimizer's state, all of it on the device (``nn.Embedding(sparse=True)``): the largest width that trains.
Then a wider one with tables and state in pinned memory, by SpeedTorch's own calls under ``prefetch``: milliseconds a step,
and the most bytes of the device that were in use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _common import report, synchronize
from _speedtorch import SpeedTorchOptions, collect, finish
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.optim import Optimizer

import rowferry.speedtorch as SpeedTorch


@dataclass(frozen=True)
class Work:
    """One of their two trainings: rows of each table, a batch of ``batch`` ids of ``u``, each with others of ``v``."""

    name: str
    rows: int
    width: int
    batch: int
    positive: int
    negative: int

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        if self.name == "Adagrad":
            return torch.optim.Adagrad(model.parameters(), lr=0.05)
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def drawn(self, rng: np.random.Generator) -> tuple[Any, Any]:
        """An item: ids of ``u``, and positives and negatives of ``v``."""
        u = rng.integers(0, self.rows, (self.batch, 1))
        return u, (
            rng.integers(0, self.rows, (self.batch, self.positive)),
            rng.integers(0, self.rows, (self.batch, self.negative)),
        )


LIMIT = 11_170_000_000  # bytes of the device that torch may use
THEIRS = (Work("Adagrad", 2_829_853, 496, 128, 4, 128), Work("SGD", 14_886_544, 188, 512, 4, 132))
SMALL = (Work("Adagrad", 300, 4, 2, 4, 128), Work("SGD", 400, 3, 2, 4, 132))


class Net(nn.Module):
    """Two embeddings of ``rows`` and a loss of negative sampling."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.u = nn.Embedding(rows, width, sparse=True, device=device)
        self.v = nn.Embedding(rows, width, sparse=True, device=device)

    def forward(self, u: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        given = self.u(u)
        found = self.v(torch.cat([positive.reshape(-1), negative.reshape(-1)]))  # in the order of the slots
        kinds = found.split([positive.numel(), negative.numel()])
        near, far = ((given * rows.view(*ids.shape, -1)).sum(2) for rows, ids in zip(kinds, (positive, negative), strict=True))
        return -(logsigmoid(near).mean() + logsigmoid(-far).mean())


def in_order(parameter: Tensor) -> None:
    """Say of a sparse gradient that its rows ascend and occur once: each slot was looked up once, in order.

    Else the optimizer sorts them by ``Tensor.coalesce``, and in torch 2.11 for CUDA 13.0 that sort has a race on Hopper cards
    which reads outside its memory when other kernels run beside it (NVIDIA/cccl issue 5297).
    """
    assert parameter.grad is not None
    given = parameter.grad
    parameter.grad = torch.sparse_coo_tensor(
        given._indices(), given._values(), given.shape, is_coalesced=True, check_invariants=False
    )


def trains_on_the_device(work: Work, width: int) -> bool:
    """Whether two steps with everything on the device fit in its memory."""
    collect()
    try:
        model = Net(work.rows, width, torch.device("cuda"))
        optimizer = work.make_optimizer(model)
        rng = np.random.default_rng(0)
        for _ in range(2):
            u, (positive, negative) = work.drawn(rng)
            optimizer.zero_grad()
            model(*(torch.from_numpy(ids).cuda() for ids in (u, positive, negative))).backward()
            optimizer.step()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def widest_on_the_device(work: Work, limit: int) -> int:
    """The largest width that trains. Nothing wider than what the tables alone would fill is tried."""
    tables = 4 if work.name == "Adagrad" else 2
    fits, too_wide = 1, limit // (tables * work.rows * 4) + 2
    while too_wide - fits > 1:
        middle = (fits + too_wide) // 2
        if trains_on_the_device(work, middle):
            fits = middle
        else:
            too_wide = middle
    collect()
    return fits


def switchers(work: Work, model: Net, optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Tables, and state where the optimizer has any, in pinned memory."""
    groups: list[tuple[Any, ...]] = []
    for name in ("u", "v"):
        table = SpeedTorch.ModelFactory(getattr(model, name), work.rows, work.width, CPUPinn=True)
        table.uniformDistributionInit(-0.5 / work.width, 0.5 / work.width)
        group: tuple[Any, ...] = (table,)
        if work.name == "Adagrad":
            state = SpeedTorch.OptimizerFactory(optimizer, work.rows, work.width, model, name, CPUPinn=True)
            state.optInit()
            group = (table, state)
        groups.append(group)
    return groups


def train(work: Work, options: SpeedTorchOptions) -> dict[str, Any]:
    """Steps of their loop, the first third to warm up."""
    steps = options.batches(300)
    collect()
    if options.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = Net(1, work.width, options.device)
    optimizer = work.make_optimizer(model)
    groups = switchers(work, model, optimizer)
    rng = np.random.default_rng(1)
    batches = [work.drawn(rng) for _ in range(steps)]
    slots = [torch.from_numpy(groups[0][0].variableTransformer(work.batch, 1)).to(options.device)]
    pair = groups[1][0].variableTransformer(work.batch, work.positive, work.negative)
    slots += [torch.from_numpy(each).to(options.device) for each in pair]
    start, first, loss = 0.0, steps // 3, torch.zeros(())
    for number, (u, v) in enumerate(SpeedTorch.prefetch(groups, batches, threads=options.threads)):
        if number == first:
            synchronize()
            start = time.perf_counter()
        for group, index in zip(groups, ((u,), v), strict=True):
            for switcher in group:
                switcher.beforeForwardPass(*index)
        optimizer.zero_grad()
        loss = model(*slots)
        loss.backward()
        for parameter in model.parameters():
            in_order(parameter)
        optimizer.step()
        for group, index in zip(groups, ((u,), v), strict=True):
            for switcher in group:
                switcher.afterOptimizerStep(*index)
    synchronize()
    took = time.perf_counter() - start
    if not bool(torch.isfinite(loss)):
        raise AssertionError(f"the loss is {loss.item()}")
    peak = {"allocated": 0, "reserved": 0}
    if options.device.type == "cuda":
        peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {
        "width": work.width,
        "ms_a_step": 1e3 * took / (steps - first),
        "device_peak_bytes": peak,
        "pinned_bytes": sum(store.nbytes for group in groups for switcher in group for store in switcher._stores.values()),
        "loss": loss.item(),
    }


def measure(options: SpeedTorchOptions) -> Iterator[dict[str, Any]]:
    works = SMALL if options.smoke else THEIRS
    if options.device.type != "cuda":
        yield from (report(named(work) | train(work, options)) for work in works)
        return
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(options.device).total_memory)
    try:
        for work in works:
            yield report(named(work) | {"widest_on_the_device": widest_on_the_device(work, LIMIT)} | train(work, options))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def named(work: Work) -> dict[str, Any]:
    return {"work": work.name, "rows": work.rows, "tables": 2}


if __name__ == "__main__":
    finish("widest_embedding", __doc__ or "", measure, limit_bytes=LIMIT)
