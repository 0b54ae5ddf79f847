"""From the arguments of a pipeline to its parts: streams, arenas, kernels; movers come from ``_candidates.py``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from rowferry.stores._device_contract import Device
from rowferry.stores._devices import device_for

from ._candidates import Needs, kernels_available, make_movers
from ._chunk_shuffle import ChunkShuffled
from ._counters import Counters
from ._ids import Permute
from ._ranges import ranges_wanted
from ._run import Parts, Settings, Streams
from ._sampling import BatchSource, BuiltIn
from ._shuffle import CUDA_SOURCE, Permutation
from ._source import Source
from ._staging import Arenas, PinnedPool, default_staging
from ._timeline import Timeline
from ._warm import warm
from ._window import Plan, TorchPlan
from ._window_in_order import InOrderPlan
from ._window_on_host import HostPlan

PERMUTE_BLOCKS = 32
MOST_DEPTH = 256  # the kernels of a plan number the older windows in a byte
MOST_BATCHES = 1024  # lookahead="auto": the slot's bytes decide long before, but for tiny batches


def resolve_device_object(device: Any) -> Device:
    """``device=`` as the object the pipeline drives; a ``Device`` (a simulated one) is taken as it is."""
    return device if hasattr(device, "launch") else device_for(device)


def make_settings(*, lookahead: Any, depth: Any, writable: bool, fetch: bool) -> Settings:
    """Check and gather what decides how windows are made.

    Raises:
        TypeError, ValueError: not numbers, or out of range.
    """
    if lookahead == "auto":
        lookahead = MOST_BATCHES
    for name, value, least in (("lookahead", lookahead, 0), ("depth", depth, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {value!r}" + (" (or 'auto')" if name == "lookahead" else ""))
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if not fetch and not writable:
        raise ValueError("fetch=False hands out rows to be written, so it needs writable=True")
    inline = lookahead == 0
    return Settings(1 if inline else depth, max(lookahead, 1), inline, writable, fetch)


def make_parts(
    source: Source,
    settings: Settings,
    device: Device,
    counters: Counters,
    *,
    mover: str,
    staging_bytes: int | None,
    batch_size: int | None,
    threads: int,
    batches: BatchSource,
) -> Parts:
    """Slots, streams and movers. Allocates ``staging_bytes`` on the device.

    Raises:
        ValueError: ``staging_bytes`` is not a positive integer, or too little for a batch of ``batch_size`` rows.
    """
    total = staging_bytes
    if total is None:
        total = default_staging(device, source, depth=settings.depth, writable=settings.writable)
    if isinstance(total, bool) or not isinstance(total, int) or total <= 0:
        raise ValueError(f"staging_bytes is {staging_bytes!r}; it must be a positive number of bytes or None")
    # No row is in two windows, nor twice in one; and to read rows in their order costs as much as to read them ascending.
    once = isinstance(batches, ChunkShuffled) or (isinstance(batches, BuiltIn) and not batches.shuffle)
    lends = once and not settings.writable and not device.asynchronous
    arenas = Arenas(device, source, depth=settings.depth, total=total, writable=settings.writable, lends=lends)
    if batch_size is not None and isinstance(batch_size, int):
        needed = arenas.needed([min(batch_size, table.rows) for table in source.tables])
        if needed > arenas.slot_bytes:
            raise ValueError(
                f"a batch of {batch_size} rows takes {needed} bytes and a slot has {arenas.slot_bytes}; pass "
                f"staging_bytes={needed * arenas.depth} or more, or a smaller batch_size"
            )
    casts = counters.overflow is None
    needs = Needs(fetches=settings.fetch, drains=settings.writable)
    movers = make_movers(mover, source, device, threads, needs, casts=casts)
    streams, pool = make_streams(device), PinnedPool(device)
    timeline = Timeline(device, counters, device.link_rate(), ranges_wanted())
    plan = InOrderPlan() if arenas.lends else make_plan(device, settings.depth)
    permute, pid = make_permute(device), os.getpid()
    parts = Parts(source, settings, device, streams, arenas, pool, movers, plan, permute, counters, timeline, pid)
    warm(parts)
    return parts


def make_permute(device: Device) -> Permute | None:
    """Evaluates a shuffled order on the device, by a kernel; None where there is none."""
    if not device.is_cuda or not kernels_available(device):
        return None
    from rowferry.stores._kernels import kernels  # imports CuPy

    launch = kernels(device.torch, CUDA_SOURCE, {"permute_range": (0, 0, 1, 1, 1, 0, 0, 0, 0)})["permute_range"]

    def permute(out: Tensor, start: int, permutation: Permutation) -> None:
        numbers = (number - (1 << 64) if number >> 63 else number for number in permutation.parameters())  # as signed
        launch(PERMUTE_BLOCKS, start, out.numel(), *numbers, int(out.dtype == torch.int64), out.data_ptr())

    return permute


def make_plan(device: Device, depth: int) -> Plan:
    """Plans windows: by kernels of its own where there are any, else by torch operators."""
    if not device.is_cuda or not kernels_available(device) or depth > MOST_DEPTH:
        return TorchPlan() if device.asynchronous else HostPlan()
    from ._plan_kernels import CudaPlan  # imports CuPy

    return CudaPlan(device.torch)


def make_streams(device: Device) -> Streams:
    """The plan's stream has priority: it is short, and the next fetch waits for it."""
    return Streams(device.stream("plan", high_priority=True), device.stream("fetch"), device.stream("writer"))


def thread_count(threads: Any) -> int:
    """``threads=`` checked; the cores that this process may use, at most 16, when None."""
    if threads is None:
        return min(len(os.sched_getaffinity(0)), 16)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}; it must be a positive integer or None")
    return threads
