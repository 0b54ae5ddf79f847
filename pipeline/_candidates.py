"""Which movers can serve a store on a device, and the one that ``mover=`` names; between several ``Chosen`` chooses."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, final

from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._casts_on_host import casts_on_host
from rowferry.stores._device_contract import Device

from ._chosen import Chosen, Learnt
from ._copy import Copy
from ._movers import Kernels, Mover, Resident, TorchKernels, ZeroCopy
from ._source import Column, Source
from ._trial import Judge, Trial

MoverName = Literal["auto", "local", "copy", "zero-copy"]
MOVERS = ("auto", "local", "copy", "zero-copy")

logger = logging.getLogger("rowferry")


class Ways(NamedTuple):
    """How rows cross, as users are told: ``names`` and ``why``."""

    names: str
    why: str


class Needs(NamedTuple):
    """What the movers of a pipeline must do."""

    fetches: bool = True
    drains: bool = False


READS = Needs()
LOCAL = Ways(Resident.name, Resident.why)


def ways(source: Source, movers: Sequence[Sequence[Mover]]) -> Ways:
    """What the movers of all columns are and say now."""
    labelled = [
        (column.label, mover)
        for table, mine in zip(source.tables, movers, strict=True)
        for column, mover in zip(table.columns, mine, strict=True)
    ]
    names = ", ".join(dict.fromkeys(mover.name for _, mover in labelled))
    if len({mover.why for _, mover in labelled}) == 1:
        return Ways(names, labelled[0][1].why)
    return Ways(names, "; ".join(f"{label}: {mover.why}" for label, mover in labelled))


def is_local(store: Store, device: Device) -> bool:
    """Whether the device reads the store's memory directly."""
    return store.memory is not None and store.device == device.torch and (device.is_cuda or not device.asynchronous)


def bus_memory(store: Store, device: Device) -> Tensor | None:
    """The store's memory where the device's copy engine and kernels reach it over the bus as it is; else None."""
    if store.memory is None or store.device.type != "cpu" or store.guarded:
        return None
    return store.memory if (store.pinned if device.is_cuda else device.asynchronous) else None


def can_zero_copy(store: Store, device: Device) -> bool:
    """Whether a kernel of the device may read the store's memory over the bus now."""
    return bus_memory(store, device) is not None and (kernels_available(device) or not device.is_cuda)


def why_not(name: str, store: Store, device: Device) -> str | None:
    """What speaks against mover ``name`` for a store on a device; None when it is possible."""
    if name == "local" and not is_local(store, device):
        return f"mover='local' needs the rows in {device.torch} memory; {store.name} is not there"
    if name == "zero-copy" and not can_zero_copy(store, device):
        lockable = device.is_cuda and (store.pinned or store.page_cache is not None)
        if not lockable:
            return (
                f"mover='zero-copy' needs a CUDA device, and a PinnedStore or a .npy file opened with mode='r'; "
                f"{store.name} on {device.torch} is not that"
            )
        if not kernels_available(device):
            return f"mover='zero-copy' needs its kernels: {_missing_kernels()}"
    return None


def mover_name(wanted: str, store: Store, device: Device) -> str:
    """The mover of one column; of several that ``auto`` tries, the preferred one.

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


def is_all_local(wanted: str, source: Source, device: Device) -> bool:
    """Whether nothing of ``source`` has to cross. Raises as ``mover_name`` does."""
    names = {mover_name(wanted, store, device) for store in source.stores}
    return names == {"local"}


def make_movers(wanted: str, source: Source, device: Device, threads: int, needs: Needs, *, casts: bool) -> list[list[Mover]]:
    """A mover for each column of each table.

    Args:
        needs: what movers must do.
        casts: rows may be cast before they cross; not where the device shall see what a cast does to them.

    Raises:
        ValueError: as ``mover_name``; a file that shall be read by zero-copy cannot be page-locked.
    """
    casts = casts and not needs.drains
    return [[_mover_of(wanted, column, device, threads, needs, casts) for column in table.columns] for table in source.tables]


def _mover_of(wanted: str, column: Column, device: Device, threads: int, needs: Needs, casts: bool) -> Mover:
    store = column.store
    name = mover_name(wanted, store, device)
    first = make_mover(name, store, device, threads, needs)
    if wanted != "auto" or not isinstance(first, Copy | ZeroCopy):
        return first
    movers: list[Mover] = [first]
    if name != "copy":
        movers.append(make_mover("copy", store, device, threads, needs))
    writes = len(movers) if needs.drains else 0
    if casts and device.asynchronous and casts_on_host(store.dtype, column.dtype):
        movers.append(Copy(device, store, threads, cast=column.dtype))
    later = None
    if device.is_cuda and not store.pinned and store.page_cache is not None:
        later = _OverPageCache(store, device)
    if len(movers) == 1 and later is None:
        return first
    judge = functools.partial(_make_judge, column.label)
    return Chosen(device, movers, store.row_nbytes, judge, writes=writes, later=later)


def _make_judge(label: str, names: Sequence[str], what: str) -> Judge:
    """A trial that says in the log what it chose. ``what`` is "reading" or "writing"."""
    tell: Callable[[str], None] = functools.partial(logger.info, "%s %s by %s", what, label)
    return Trial(names, in_turn=what == "reading", settled=tell)


def go_on(movers: Sequence[Sequence[Mover]], learnt: Sequence[Sequence[Learnt | None]] | None) -> list[list[Learnt | None]]:
    """Before the first window: movers go on with what an earlier pipeline over the same stores has learnt.

    What is known now: what they know, and of a mover that does not choose what was known before.
    """
    before = learnt or [[None for _ in mine] for mine in movers]
    for mine, known in zip(movers, before, strict=True):
        for mover, one in zip(mine, known, strict=True):
            if isinstance(mover, Chosen) and one is not None:
                mover.go_on_with(one)
    return [
        [mover.learnt() if isinstance(mover, Chosen) else one for mover, one in zip(mine, known, strict=True)]
        for mine, known in zip(movers, before, strict=True)
    ]


def make_mover(name: str, store: Store, device: Device, threads: int, needs: Needs = READS) -> Mover:
    """The mover ``name``, which was found possible, for one column.

    Raises:
        ValueError: a file that shall be read by zero-copy cannot be page-locked.
    """
    if name == "local" or (name == "copy" and device.is_cuda and store.device.type == "cuda"):
        return Resident(device, store)
    bus = bus_memory(store, device)
    if name == "copy":
        why = "host threads gather rows ahead of use" + (", the copy engine carries them" if device.asynchronous else "")
        if device.is_cuda and store.pinned and not kernels_available(device):
            why += f"; no kernel, since {_missing_kernels()}"
        return Copy(device, store, threads, bus=bus, why=why)
    if bus is None:
        assert store.page_cache is not None
        try:
            bus = store.page_cache.lock()
        except MemoryError as refused:
            raise ValueError(f"mover='zero-copy' cannot read {store.name} where it lies: {refused}") from refused
    return ZeroCopy(device, bus, kernels_for(device, needs))


def kernels_for(device: Device, needs: Needs = READS) -> Kernels:
    """Row kernels of the device, compiled and warmed; of as many blocks as one direction needs, or both at once."""
    if not device.is_cuda:
        return TorchKernels()
    from rowferry.stores._kernels import BOTH_WAYS, RowKernels  # imports CuPy

    return RowKernels(device.torch, **(BOTH_WAYS if needs.fetches and needs.drains else {}))


def kernels_available(device: Device) -> bool:
    """Whether the device can run CUDA kernels of ours."""
    from rowferry.stores._kernels import available

    return available(device.torch)


def _missing_kernels() -> str:
    from rowferry.stores._kernels import why_unavailable

    return why_unavailable()


@final
class _OverPageCache:
    """A kernel that reads a file where it lies in the page cache: possible once the file is there.

    Asked at the start of each epoch. A file that is mostly in memory is locked at once, at a few hundredths of a second a
    GiB; one that is not is read by ``copy`` first, which brings it in, so that no first batch waits for a whole file.
    """

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._device = device
        self._epochs = 0
        self.reason = ""
        self._kernels = kernels_for(device) if kernels_available(device) else None

    def join(self) -> Mover | None:
        """See ``Later``."""
        cache = self._store.page_cache
        if cache is None:  # the store was closed; the fetch says so
            return None
        reason = cache.why_not(read_before=self._epochs > 0) if self._kernels is not None else _missing_kernels()
        self._epochs += 1
        if not reason:
            try:
                return ZeroCopy(self._device, cache.lock(), self._kernels or kernels_for(self._device))
            except MemoryError as refused:
                reason = str(refused)
        reason = f"not where it lies in the page cache: {reason}"
        if not self.reason:  # said once: it holds figures that change
            logger.info("%s is read by copy, %s", self._store.name, reason)
        self.reason = reason
        return None
