"""Who writes which store, process-wide: one writable pipeline over a store at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from rowferry.stores import Store


class Writer(Protocol):
    """A pipeline, as far as claims care."""

    def _land(self) -> None:
        """All that was written is in the stores when this returns. No commit."""


@dataclass(frozen=True)
class _Extent:
    """What a store writes to: a file or a memory by identity, and memory by address too, since views may overlap."""

    store: weakref.ref[Store]
    identity: Hashable
    device: torch.device
    start: int
    stop: int

    @property
    def live(self) -> bool:
        """Whether the store still has its memory; an address that was given up may belong to anybody."""
        store = self.store()
        return store is not None and not store.closed

    def meets(self, other: _Extent) -> bool:
        """Whether writing one changes the other."""
        if self.identity == other.identity:
            return True
        return self.device == other.device and self.start < other.stop and other.start < self.stop


def _extent(store: Store) -> _Extent:
    memory = store.memory
    start = memory.data_ptr() if memory is not None else 0
    return _Extent(weakref.ref(store), store.identity, store.device, start, start + (store.nbytes if memory is not None else 0))


class Claim:
    """A writable pipeline's hold on its stores, until ``release``."""

    def __init__(self, writer: Writer, extents: list[_Extent]) -> None:
        self.writer = weakref.ref(writer)
        self.extents = extents

    def release(self) -> None:
        """Others may write them now."""
        with _LOCK:
            if self in _CLAIMS:
                _CLAIMS.remove(self)


_CLAIMS: list[Claim] = []
_LOCK = threading.Lock()  # guards _CLAIMS: which pipeline writes what, process-wide


def claim(pipe: Writer, stores: list[Store]) -> Claim:
    """Refuse read-only stores, the same memory twice, and what another live pipeline writes."""
    extents: list[_Extent] = []
    for store in stores:
        if not store.writable:
            raise PermissionError(f"{store.name} is read-only; a writable pipeline needs it opened with mode='r+'")
        extent = _extent(store)
        if any(extent.meets(other) for other in extents):
            raise ValueError(f"memory of {store.name} appears twice in source; a writable pipeline needs each row once")
        extents.append(extent)
    with _LOCK:
        _CLAIMS[:] = [held for held in _CLAIMS if held.writer() is not None]
        for store, extent in zip(stores, extents, strict=True):
            writer = _writer_of(extent)
            if writer is not None:
                raise RuntimeError(f"{store.name} is already written by {writer!r}; close that pipeline first")
        made = Claim(pipe, extents)
        _CLAIMS.append(made)
    return made


def drain_writer_of(store: Store, reader: Writer) -> None:
    """A reader that begins sees what a live writer of the same store has written so far."""
    with _LOCK:
        writer = _writer_of(_extent(store))
    if writer is not None and writer is not reader:
        writer._land()


def _writer_of(extent: _Extent) -> Writer | None:
    """Under the lock."""
    for held in _CLAIMS:
        if any(other.live and extent.meets(other) for other in held.extents):
            return held.writer()
    return None
