"""Stores that are slow, take a given time or fail on demand, around any other store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from rowferry.stores import Store


class _Around(Store):
    """What both have in common: rows, flush and close of ``inner``, and no ``memory``, so that every read is a call."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self.shape = inner.shape
        self.dtype = inner.dtype
        self.writable = inner.writable
        self.device = inner.device
        self.chunk_rows = inner.chunk_rows

    @property
    def identity(self) -> Hashable:
        return self.inner.identity

    def _flush(self, sync: bool) -> None:
        self.inner.flush(sync)

    def _close(self) -> None:
        self.inner.close()


@final
class SlowStore(_Around):
    """Reads wait for one event and writes for another; both are open until a test closes them.

    A blocked call releases the GIL. Set the events at the end of a test, or its threads stay.

    Attributes:
        reads: reads wait for it; ``reads.clear()`` holds them back.
        writes: the same for writes.
        blocked: set once a read or write has come to wait.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.blocked = threading.Event()
        self.reads.set()
        self.writes.set()

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._pass(self.reads)
        self.inner._gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._pass(self.writes)
        self.inner._scatter(rows, values)

    def _pass(self, gate: threading.Event) -> None:
        if not gate.is_set():
            self.blocked.set()
            gate.wait()


@final
class CostlyStore(_Around):
    """Calls ``read`` or ``write`` with the bytes of each access, to spend their time (``SimulatedDevice.spend``).

    Args:
        in_memory: it shows the memory of ``inner``, as a store does that needs no backend.
    """

    def __init__(
        self,
        inner: Store,
        *,
        read: Callable[[int], None] = lambda nbytes: None,
        write: Callable[[int], None] = lambda nbytes: None,
        in_memory: bool = False,
    ) -> None:
        super().__init__(inner)
        self._read, self._write = read, write
        self.memory = inner.memory if in_memory else None

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._read(out.numel() * out.itemsize)
        self.inner._gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._write(values.numel() * values.itemsize)
        self.inner._scatter(rows, values)


@final
class FailingStore(_Around):
    """Raises copies of ``error`` from the reads and writes that are told, before they touch ``inner``.

    Args:
        inner: where the others go.
        error: what is raised.
        rows: a read or write with any of these rows fails.
        reads: numbers of the reads that fail, from 1.
        writes: numbers of the writes that fail, from 1.

    Attributes:
        broken: while True, all reads and writes fail.
        read_count, write_count: calls so far, those that failed too.
    """

    def __init__(
        self,
        inner: Store,
        error: OSError,
        *,
        rows: Collection[int] = (),
        reads: Collection[int] = (),
        writes: Collection[int] = (),
        broken: bool = False,
    ) -> None:
        super().__init__(inner)
        self.broken = broken
        self.read_count = 0
        self.write_count = 0
        self._error = error
        self._rows = np.fromiter(rows, np.int64)
        self._reads = frozenset(reads)
        self._writes = frozenset(writes)
        self._counting = threading.Lock()  # guards the two counts

    def heal(self) -> None:
        """From now on nothing fails."""
        self.broken = False
        self._rows = np.empty(0, np.int64)
        self._reads = self._writes = frozenset()

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        with self._counting:
            self.read_count += 1
            fails = self.read_count in self._reads
        self._fail_if(fails, rows)
        self.inner._gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        with self._counting:
            self.write_count += 1
            fails = self.write_count in self._writes
        self._fail_if(fails, rows)
        self.inner._scatter(rows, values)

    def _fail_if(self, told: bool, rows: NDArray[np.int64]) -> None:
        if told or self.broken or bool(np.isin(rows, self._rows).any()):
            raise type(self._error)(*self._error.args)
