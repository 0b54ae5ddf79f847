"""SpeedTorch's tables, run again: rows to and from a CUDA variable, from its four kinds of memory, and what they hold.

A table of rows x 128 float32; 131,072 of them to the variable (``beforeForwardPass``) and from it (``afterOptimizerStep``), the
mean of 100 calls, with repeats (``randint``) and without (``randperm``), row numbers on the host as scripts have them and on
the device. Beside it in the same run: CuPy's and torch's indexing of the same kinds of memory, and the link alone.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from _common import report, synchronize
from _speedtorch import SpeedTorchOptions, collect, finish, milliseconds
from torch import Tensor, nn

import rowferry as rf
import rowferry.speedtorch as SpeedTorch

WIDTH = 128
BATCH = 131_072
SIZES = (1_000_000, 10_000_000)  # and that of --rows-gib
SLOW = "torch pinned, a[index].to(cuda)"
Calls = tuple[Callable[[], Any], Callable[[], Any]]
Peers = dict[str, Callable[[Any, Tensor], Calls]]
"""By name, what makes calls of an index on the host and the same on the device."""

STORES: dict[str, Callable[[nn.Embedding, int], Any]] = {
    "SpeedTorch cuda": lambda variable, rows: SpeedTorch.ModelFactory(variable, rows, WIDTH),
    "SpeedTorch pinned CPU": lambda variable, rows: SpeedTorch.ModelFactory(variable, rows, WIDTH, CPUPinn=True),
    "PyTorch cuda": lambda variable, rows: SpeedTorch.GPUPytorchModelFactory(variable, rows, WIDTH),
    "PyTorch pinned CPU": lambda variable, rows: SpeedTorch.CPUPytorchModelFactory(variable, rows, WIDTH),
}


def index_of(rows: int, count: int, *, repeats: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if repeats:
        return torch.randint(0, rows, (count,), generator=generator)
    return torch.from_numpy(np.random.default_rng(0).choice(rows, count, replace=False))


def switched(switcher: Any, index: Any) -> Calls:
    return lambda: switcher.beforeForwardPass(index), lambda: switcher.afterOptimizerStep(index)


def check(switcher: Any, variable: nn.Embedding, index: Tensor) -> None:
    """Rows that were written are the rows that are read: the last of each."""
    switcher.beforeForwardPass(index.numpy())
    values = torch.arange(index.numel(), device=variable.weight.device)[:, None].expand(-1, WIDTH)
    variable.weight.data.copy_(values)
    switcher.afterOptimizerStep(index.numpy())
    switcher.beforeForwardPass(index.numpy())
    last = dict(zip(index.tolist(), range(index.numel()), strict=True))
    wanted = torch.tensor([float(last[row]) for row in index.tolist()])
    if not torch.equal(variable.weight.data[:, 0].cpu(), wanted) or not torch.equal(variable.weight.data[:, -1].cpu(), wanted):
        raise AssertionError("wrong rows")


def in_device_memory(rows: int, device: torch.device) -> Peers:
    """torch's and CuPy's indexing of a table in the memory of the GPU: the latter is what SpeedTorch's ``cuda`` did."""
    values = torch.ones(BATCH, WIDTH, device=device)
    table = torch.zeros(rows, WIDTH, device=device)
    peers: Peers = {
        "torch cuda, index_select and index_copy_": lambda _numbers, here: (
            lambda: table.index_select(0, here),
            lambda: table.index_copy_(0, here, values[: len(here)]),
        ),
        "torch cuda, a[index]": lambda _numbers, here: (
            lambda: table[here],
            lambda: table.__setitem__(here, values[: len(here)]),
        ),
    }
    if device.type == "cuda":
        peers["CuPy a[index] in the GPU's memory"] = with_cupy(table, values)
    return peers


def in_pinned_memory(rows: int, device: torch.device) -> Peers:
    """torch's and CuPy's indexing of pinned memory: what ``CPUPytorch*`` and ``CPUPinn`` did."""
    values = torch.ones(BATCH, WIDTH, device=device)
    pinned = rf.PinnedStore.zeros((rows, WIDTH), torch.float32)
    host = pinned.torch()
    peers: Peers = {
        SLOW: lambda numbers, _here: (
            lambda: host[numbers].to(device),
            lambda: host.__setitem__(numbers, values[: len(numbers)].cpu()),
        )
    }
    if device.type == "cuda":
        peers["CuPy a[index] over pinned memory"] = with_cupy(pinned.cupy(), values)
    return peers


def with_cupy(table: Any, values: Tensor) -> Callable[[Any, Tensor], Calls]:
    """CuPy's fancy indexing by a NumPy array, as SpeedTorch was called; what is read goes to torch as it went there."""
    import cupy

    array, given = cupy.asarray(table), cupy.from_dlpack(values)
    return lambda numbers, _here: (
        lambda: torch.utils.dlpack.from_dlpack(array[numbers]),
        lambda: array.__setitem__(numbers, given[: len(numbers)]),
    )


def link(count: int, device: torch.device) -> Calls:
    host = torch.empty(count, WIDTH, pin_memory=device.type == "cuda")
    there = torch.empty(count, WIDTH, device=device)
    return lambda: there.copy_(host, non_blocking=True), lambda: host.copy_(there, non_blocking=True)


def timed(options: SpeedTorchOptions, work: str, calls: Calls, *, slow: bool = False, **facts: Any) -> dict[str, Any]:
    times = options.batches(5 if slow else 100)
    to, back = (milliseconds(call, times, options.runs) for call in calls)
    return report(
        {
            "work": work,
            **facts,
            "to_ms": statistics.median(to),
            "from_ms": statistics.median(back),
            "to_range": [min(to), max(to)],
            "from_range": [min(back), max(back)],
        }
    )


def table(options: SpeedTorchOptions, rows: int) -> Iterator[dict[str, Any]]:
    """All cells of one size."""
    yield timed(options, "the link alone", link(options.ids(BATCH), options.device), rows=rows)
    variable = nn.Embedding(1, WIDTH).to(options.device)
    indexes = {repeats: index_of(rows, options.ids(BATCH), repeats=repeats) for repeats in (True, False)}
    for name, make in STORES.items():
        switcher = make(variable, rows)
        switcher.zerosInit()
        for repeats, index in indexes.items():
            check(switcher, variable, index)
            for where, given in (("host", index.numpy()), ("device", index.to(options.device))):
                yield timed(options, name, switched(switcher, given), index=where, rows=rows, repeats=repeats)
        del switcher
        collect()
    for peers in (in_device_memory, in_pinned_memory):
        made = peers(rows, options.device)
        for name, calls in made.items():
            for repeats, index in indexes.items():
                both = calls(index.numpy(), index.to(options.device))
                yield timed(options, name, both, slow=name == SLOW, rows=rows, repeats=repeats)
        del made, calls, both
        collect()


def optimizer_state(options: SpeedTorchOptions, rows: int) -> list[dict[str, Any]]:
    """Adagrad's sums to and from the optimizer, from pinned memory and from the GPU's."""
    results = []
    model = nn.ModuleDict({"e": nn.Embedding(1, WIDTH)}).to(options.device)
    optimizer = torch.optim.Adagrad(model.parameters())
    index = index_of(rows, options.ids(BATCH), repeats=True).numpy()
    for pinned in (True, False):
        state = SpeedTorch.OptimizerFactory(optimizer, rows, WIDTH, model, "e", CPUPinn=pinned)
        state.optInit()
        work = f"optimizer state, {'pinned CPU' if pinned else 'cuda'}"
        results.append(timed(options, work, switched(state, index), rows=rows, repeats=True, index="host"))
        del state
        collect()
    return results


def prefetched(options: SpeedTorchOptions, rows: int) -> list[dict[str, Any]]:
    """A step of a loop under ``prefetch``: rows read, and rows read and written. The first third warms up."""
    variable = nn.Embedding(1, WIDTH).to(options.device)
    switcher = SpeedTorch.ModelFactory(variable, rows, WIDTH, CPUPinn=True)
    switcher.zerosInit()
    rng = np.random.default_rng(0)
    ring = [rng.integers(0, rows, options.ids(BATCH)) for _ in range(16)]
    steps = options.batches(300)
    results = []
    for writes in (False, True):
        found = []
        for _ in range(options.runs):
            batches = [ring[number % len(ring)] for number in range(steps)]
            start = 0.0
            for number, index in enumerate(SpeedTorch.prefetch(switcher, batches, threads=options.threads)):
                if number == steps // 3:
                    synchronize()
                    start = time.perf_counter()
                switcher.beforeForwardPass(index)
                if writes:
                    switcher.afterOptimizerStep(index)
            synchronize()
            found.append(1e3 * (time.perf_counter() - start) / (steps - steps // 3))
        work = "read and write a step, prefetch" if writes else "read a step, prefetch"
        results.append(report({"work": work, "rows": rows, "ms": statistics.median(found), "range": [min(found), max(found)]}))
    return results


def memory(rows: int, device: torch.device) -> list[dict[str, Any]]:
    """What each kind of table adds: memory that the process has resident, and memory of the GPU."""
    results = []
    variable = nn.Embedding(1, WIDTH).to(device)
    for name, make in STORES.items():
        warm = make(variable, 1000)
        warm.zerosInit()
        for call in switched(warm, np.array([0])):  # what kernels and contexts take is nobody's table
            call()
        del warm, call
        collect()
        resident, used = held(device)
        switcher = make(variable, rows)
        switcher.zerosInit()
        switcher.beforeForwardPass(np.array([0]))
        synchronize()
        after = held(device)
        bytes_of_rows = rows * WIDTH * 4
        results.append(
            report(
                {
                    "work": f"memory of {name}",
                    "rows": rows,
                    "bytes_of_rows": bytes_of_rows,
                    "resident_bytes": after[0] - resident,
                    "pinned_bytes": sum(store.nbytes for store in switcher._stores.values() if store.pinned),
                    "device_bytes": after[1] - used,
                    "resident_over_rows": (after[0] - resident) / bytes_of_rows,
                }
            )
        )
        del switcher
    return results


def held(device: torch.device) -> tuple[int, int]:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        resident = int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return resident, 0
    free, total = torch.cuda.mem_get_info()
    return resident, total - free


def measure(options: SpeedTorchOptions) -> Iterator[dict[str, Any]]:
    largest = options.rows(WIDTH * 4)
    yield from memory(min(largest, SIZES[-1]), options.device)
    for rows in sorted({*(size for size in SIZES if size < largest), largest}):
        yield from prefetched(options, rows)
        yield from optimizer_state(options, rows)
        yield from table(options, rows)


if __name__ == "__main__":
    finish("speedtorch_tables", __doc__ or "", measure)
