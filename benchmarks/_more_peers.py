"""More ways of others than ``rowferry bench`` has: they need packages that are not among rowferry's, or patience.

Each is imported where it is used, and is listed as not installed where it is missing.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowferry._bench.peers import Batched, Peer, Table, anywhere, installed, loader_over
from rowferry._bench.workloads import Index
from rowferry.stores._devices import CpuDevice

WORKERS = min(len(os.sched_getaffinity(0)), 4)
THREADS = min(len(os.sched_getaffinity(0)), 16)


# ---- a DataLoader and a side stream that copies one batch ahead, as apex's examples have it --------------------------


def _open_side_stream(table: Table, batch: int) -> Batched:
    del batch
    device, side = table.device, table.device.stream("side")

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        loader = iter(loader_over(table.host, items, pin=table.on_gpu))

        def ahead() -> tuple[Tensor, Any] | None:
            rows = next(loader, None)
            if rows is None:
                return None
            with device.use(side):
                return rows.to(device.torch, non_blocking=True), device.record(side)

        following = ahead()
        while following is not None:
            rows, copied = following
            device.wait(device.current(), copied)
            device.keep(rows, device.current())
            following = ahead()
            yield rows

    return batches


# ---- a DataLoader whose worker processes index an ordinary tensor ----------------------------------------------------


def _workers_problem(table: Table) -> str:
    memory = table.store.memory
    if memory is None:
        return "needs rows in memory"
    free = CpuDevice().free_bytes()
    # Workers are forked, and pinned memory is not inherited by a forked child.
    return "" if memory.nbytes < 0.8 * free else f"needs a second table of {memory.nbytes:,} bytes; {free:,} are free"


def _open_workers(table: Table, batch: int) -> Batched:
    del batch
    assert table.store.memory is not None
    memory = table.store.memory.clone()

    def host(index: Index) -> Tensor:
        return memory[torch.from_numpy(index)]

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        for rows in loader_over(host, items, pin=table.on_gpu, workers=WORKERS):
            yield rows.to(table.device.torch, non_blocking=True)

    return batches


# ---- PyG's PrefetchLoader --------------------------------------------------------------------------------------------


def _open_pyg(table: Table, batch: int) -> Batched:
    del batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which it uses
        from torch_geometric.loader import PrefetchLoader

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        yield from PrefetchLoader(loader_over(table.host, items, pin=False), device=table.device.torch)  # it pins by itself

    return batches


# ---- SPDL: threads that index, and one that copies -------------------------------------------------------------------


def _open_spdl(table: Table, batch: int) -> Batched:
    del batch
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    # The second name is that of releases before 0.8. It copies to the GPU of LOCAL_RANK, or the first.
    transfer = getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        builder = PipelineBuilder().add_source(items).pipe(table.host, concurrency=THREADS, output_order="input")
        if table.on_gpu:
            builder = builder.pipe(transfer)
        pipeline = builder.add_sink(2).build(num_threads=THREADS + 1, max_failures=0)
        with pipeline.auto_stop():
            yield from pipeline

    return batches


# ---- JAX: a table in pinned_host memory, gathered by the host's part of a jitted function ----------------------------


def _open_jax(table: Table, batch: int) -> Batched:
    del batch
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the GPU's memory
    import jax
    from jax.sharding import SingleDeviceSharding

    assert table.store.memory is not None
    platform = "gpu" if table.on_gpu else "cpu"
    target = jax.devices(platform)[table.device.torch.index or 0]
    on_host = SingleDeviceSharding(target, memory_kind="pinned_host")
    rows = jax.device_put(table.store.memory.numpy(), on_host)

    jitted = jax.jit(_gathered_by_the_host(jax), out_shardings=SingleDeviceSharding(target, memory_kind="device"))

    def batches(items: Iterable[Index]) -> Iterator[Tensor]:
        for index in items:
            yield torch.utils.dlpack.from_dlpack(jitted(rows, jax.device_put(index.astype(np.int32), on_host)))

    return batches


def _gathered_by_the_host(jax: Any) -> Callable[[Any, Any], Any]:
    """``table[index]`` as the host's part of a jitted function, as releases before and after 0.11 say it."""
    from jax.experimental.compute_on import compute_on

    def pick(table: Any, index: Any) -> Any:
        return table[index]

    if "out_memory_spaces" in inspect.signature(compute_on).parameters:
        made: Callable[[Any, Any], Any] = compute_on(pick, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
        return made

    def gather(table: Any, index: Any) -> Any:
        with compute_on("device_host"):
            return pick(table, index)

    return gather


def _jax_problem(table: Table) -> str:
    if problem := installed("jax"):
        return problem
    import jax

    with contextlib.suppress(RuntimeError):  # JAX's word for a platform that it has not
        if jax.devices("gpu" if table.on_gpu else "cpu"):
            return ""
    return "jax is installed for another platform: it sees no GPU"


MORE_PEERS = (
    Peer("DataLoader and a side stream, apex's way", anywhere, _open_side_stream),
    Peer(f"DataLoader, pin_memory, {WORKERS} workers", _workers_problem, _open_workers),
    Peer("PyG PrefetchLoader", lambda _table: installed("torch_geometric"), _open_pyg),
    Peer(f"SPDL, {THREADS} threads", lambda _table: installed("spdl"), _open_spdl),
    Peer("JAX, pinned_host", _jax_problem, _open_jax),
)
