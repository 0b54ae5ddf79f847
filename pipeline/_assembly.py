"""From the arguments of a pipeline to its parts: which mover a column gets, streams, arenas, kernels."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._device_contract import Device
from rowferry.stores._devices import device_for

from ._copy import Copy
from ._ids import Permute
from ._movers import Kernels, Mover, Resident, TorchKernels, ZeroCopy
from ._run import Parts, Settings, Streams
from ._shuffle import CUDA_SOURCE, Permutation
from ._source import Source
from ._staging import Arenas, PinnedPool, default_staging
from ._stats import Counters
from ._warm import warm

MoverName = Literal["auto", "local", "copy", "zero-copy"]
MOVERS = ("auto", "local", "copy", "zero-copy")
PERMUTE_BLOCKS = 32
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


def is_local(store: Store, device: Device) -> bool:
    """Whether the device reads the store's memory directly."""
    return store.memory is not None and store.device == device.torch and (device.is_cuda or not device.asynchronous)


def can_zero_copy(store: Store, device: Device) -> bool:
    """Whether a kernel of the device may read the store's memory over the bus."""
    if store.memory is None or store.device.type != "cpu":
        return False
    return (store.pinned and _kernels_available(device)) if device.is_cuda else device.asynchronous


def why_not(name: str, store: Store, device: Device) -> str | None:
    """What speaks against mover ``name`` for a store on a device; None when it is possible."""
    if name == "local" and not is_local(store, device):
        return f"mover='local' needs the rows in {device.torch} memory; {store.name} is not there"
    if name == "zero-copy" and not can_zero_copy(store, device):
        if device.is_cuda and store.pinned:
            from rowferry.stores._kernels import why_unavailable

            return f"mover='zero-copy' needs its kernels: {why_unavailable()}"
        return f"mover='zero-copy' needs a PinnedStore and a CUDA device; {store.name} on {device.torch} is neither or not both"
    return None


def mover_name(wanted: str, store: Store, device: Device) -> str:
    """The mover of one column. ``auto`` goes by store and device.

    Raises:
        ValueError: unknown, or not possible for this store and device.
    """
    if wanted not in MOVERS:
        raise ValueError(f"mover is {wanted!r}; it must be one of {', '.join(map(repr, MOVERS))}")
    if wanted != "auto":
        if reason := why_not(wanted, store, device):
            raise ValueError(reason)
        return wanted
    if is_local(store, device) and store.resident():
        return "local"
    return "zero-copy" if can_zero_copy(store, device) else "copy"


def make_movers(wanted: str, source: Source, device: Device, threads: int) -> list[list[Mover]]:
    """A mover for each column of each table."""
    return [[make_mover(mover_name(wanted, column.store, device), column.store, device, threads) for column in table.columns]
            for table in source.tables]  # fmt: skip


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
) -> Parts:
    """Slots, streams and movers. Allocates ``staging_bytes`` on the device.

    Raises:
        ValueError: ``staging_bytes`` is not a positive integer, or too little for a batch of ``batch_size`` rows.
    """
    total = default_staging(device) if staging_bytes is None else staging_bytes
    if isinstance(total, bool) or not isinstance(total, int) or total <= 0:
        raise ValueError(f"staging_bytes is {staging_bytes!r}; it must be a positive number of bytes or None")
    arenas = Arenas(device, source, depth=settings.depth, total=total, writable=settings.writable)
    if batch_size is not None and isinstance(batch_size, int):
        needed = arenas.needed([min(batch_size, table.rows) for table in source.tables])
        if needed > arenas.slot_bytes:
            raise ValueError(
                f"a batch of {batch_size} rows takes {needed} bytes and a slot has {arenas.slot_bytes}; pass "
                f"staging_bytes={needed * arenas.depth} or more, or a smaller batch_size"
            )
    movers = make_movers(mover, source, device, threads)
    streams, pool = make_streams(device), PinnedPool(device)
    parts = Parts(source, settings, device, streams, arenas, pool, movers, make_permute(device), counters, os.getpid())
    warm(parts)
    return parts


def make_permute(device: Device) -> Permute | None:
    """Evaluates a shuffled order on the device, by a kernel; None where there is none."""
    if not device.is_cuda or not _kernels_available(device):
        return None
    from rowferry.stores._kernels import kernel  # imports CuPy

    launch = kernel(device.torch, CUDA_SOURCE, "permute_range", 0, 0, 1, 1, 1, 0, 0, 0, 0)

    def permute(out: Tensor, start: int, permutation: Permutation) -> None:
        numbers = (number - (1 << 64) if number >> 63 else number for number in permutation.parameters())  # as signed
        launch(PERMUTE_BLOCKS, start, out.numel(), *numbers, int(out.dtype == torch.int64), out.data_ptr())

    return permute


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


def make_mover(name: str, store: Store, device: Device, threads: int) -> Mover:
    """The mover ``name``, which was found possible, for one column."""
    if name == "local" or (name == "copy" and device.is_cuda and store.device.type == "cuda"):
        return Resident(device, store)
    if name == "zero-copy":
        return ZeroCopy(device, store, kernels_for(device))
    return Copy(device, store, threads)


def kernels_for(device: Device) -> Kernels:
    """Row kernels of the device, compiled and warmed."""
    if not device.is_cuda:
        return TorchKernels()
    from rowferry.stores._kernels import RowKernels  # imports CuPy

    return RowKernels(device.torch)


def _kernels_available(device: Device) -> bool:
    from rowferry.stores._kernels import available

    return available(device.torch)
