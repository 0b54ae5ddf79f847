"""Who writes which store, process-wide: one writable pipeline over a store at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Protocol

from rowferry.stores import Store


class Writer(Protocol):
    """A pipeline, as far as claims care."""

    def flush(self) -> None:
        """All that was written is in the stores when this returns."""


class Claim:
    """A writable pipeline's hold on its stores."""

    def __init__(self, identities: list[Hashable]) -> None:
        self._identities = identities

    def release(self) -> None:
        """Others may write them now."""
        with _WRITERS_LOCK:
            for identity in self._identities:
                _WRITERS.pop(identity, None)


_WRITERS: dict[Hashable, weakref.ref[Writer]] = {}
_WRITERS_LOCK = threading.Lock()  # guards _WRITERS: which pipeline writes which store, process-wide


def claim(pipe: Writer, stores: list[Store]) -> Claim:
    """Refuse read-only stores, the same one twice, and one that another live pipeline writes."""
    identities: list[Hashable] = []
    for store in stores:
        if not store.writable:
            raise PermissionError(f"{store.name} is read-only; a writable pipeline needs it opened with mode='r+'")
        if store.identity in identities:
            raise ValueError(f"{store.name} appears twice in source; a writable pipeline needs each store's memory once")
        identities.append(store.identity)
    with _WRITERS_LOCK:
        for store in stores:
            other = _WRITERS.get(store.identity)
            if other is not None and other() is not None:
                raise RuntimeError(f"{store.name} is already written by {other()!r}; close that pipeline first")
        for identity in identities:
            _WRITERS[identity] = weakref.ref(pipe)
    return Claim(identities)


def drain_writer_of(store: Store, reader: Writer) -> None:
    """A reader that begins sees what a live writer of the same store has written so far."""
    with _WRITERS_LOCK:
        reference = _WRITERS.get(store.identity)
    writer = reference() if reference is not None else None
    if writer is not None and writer is not reader:
        writer.flush()
