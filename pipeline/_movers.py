"""The ways rows cross: one mover a column, with a fetch into the slot and a drain out of it.

Called by the producer (``fetch``) and the writer (``drain``), each on a stream of its own, which they make current
around every launch. Both are tasks: they yield what the host must wait for.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._bytes import as_ints
from rowferry.stores._device_contract import Device, Event

from ._engine import Host, Task


class Kernels(Protocol):
    """Row copies by a kernel, on the current stream. ``RowKernels`` on CUDA, ``TorchKernels`` elsewhere."""

    def gather(self, out: Tensor, source: Tensor, rows: Tensor, *, blocks: int = 8) -> None:
        """``out[i] = source[rows[i]]``."""

    def scatter(
        self,
        target: Tensor,
        rows: Tensor,
        values: Tensor,
        *,
        places: Tensor | None = None,
        marks: Tensor | None = None,
        blocks: int = 8,
    ) -> None:
        """``target[rows[i]] = values[i]`` where ``marks[i]``."""


@final
class TorchKernels:
    """The same by torch operators, for devices without CUDA. The meaning of the kernels, and their oracle."""

    def gather(self, out: Tensor, source: Tensor, rows: Tensor, *, blocks: int = 8) -> None:
        del blocks
        torch.index_select(as_ints(source), 0, rows, out=as_ints(out))

    def scatter(
        self,
        target: Tensor,
        rows: Tensor,
        values: Tensor,
        *,
        places: Tensor | None = None,
        marks: Tensor | None = None,
        blocks: int = 8,
    ) -> None:
        del blocks
        rows = rows.to(torch.int64)
        values = values if places is None else values[places]
        if marks is not None:
            rows, values = rows[marks.bool()], values[marks.bool()]
        as_ints(target).index_copy_(0, rows, as_ints(values))


def pick_rows(device: Device, name: str, column: Tensor, places: Tensor, *, out: Tensor) -> None:
    """Launch ``out = column[places]``, bit for bit, as ``name`` on the current stream."""
    device.launch(
        name,
        lambda: torch.index_select(as_ints(column), 0, places, out=as_ints(out)),
        reads=[column, places],
        writes=[out],
    )


@dataclass(frozen=True)
class DrainList:
    """Rows of one column that go to the store.

    Attributes:
        column: the slot's column ``(d, *row_shape)``.
        marks: uint8 ``(d,)``, nonzero for rows that go; belongs to this list.
        rows: the row of each place, ``(d,)``.
        ascending: the rows in order ``(d,)``, and ``places`` where each lies, int64 ``(d,)``.
    """

    column: Tensor
    marks: Tensor
    rows: Tensor
    ascending: Tensor
    places: Tensor


class Mover(Protocol):
    """How one column's rows cross."""

    name: str
    wants_host_rows: bool
    """Whether ``fetch`` needs the rows on the host."""
    lands_on_host: bool
    """Whether host threads write what ``drain`` brings."""

    def fetch(self, stream: Any, out: Tensor, rows: Tensor, host_rows: NDArray[np.int64] | None) -> Task:
        """Fill ``out`` ``(k, *row_shape)`` with the store's ``rows`` ``(k,)``, ascending, in ``stream``'s order."""

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        """Write the listed rows to the store. Returns rows moved (None: not known to the host) and the event of a
        landing by kernel (None: a landing by the host, which is over when this returns)."""

    def bind(self, host: Host) -> None:
        """An epoch begins: ``host`` runs its threads."""

    def held(self) -> int:
        """Bytes of pinned memory held."""


@final
class ZeroCopy:
    """A kernel with few blocks reads and writes rows of pinned memory over the bus, in sorted order."""

    name = "zero-copy"
    wants_host_rows = False
    lands_on_host = False

    def __init__(self, device: Device, store: Store, kernels: Kernels) -> None:
        assert store.memory is not None
        self._device = device
        self._memory = store.memory
        self._kernels = kernels

    def fetch(self, stream: Any, out: Tensor, rows: Tensor, host_rows: NDArray[np.int64] | None) -> Task:
        del host_rows
        with self._device.use(stream):
            self._device.launch("fetch", lambda: self._kernels.gather(out, self._memory, rows), reads=[rows], writes=[out])
        yield from ()

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        with self._device.use(stream):
            self._device.launch(
                "drain",
                lambda: self._kernels.scatter(self._memory, listed.rows, listed.column, marks=listed.marks),
                reads=[listed.rows, listed.column, listed.marks],
            )
            event = self._device.record(stream)
        yield from ()
        return None, event

    def bind(self, host: Host) -> None:
        del host

    def held(self) -> int:
        return 0


@final
class Resident:
    """The store is on the device: nothing crosses."""

    name = "local"
    wants_host_rows = False
    lands_on_host = False

    def __init__(self, device: Device, store: Store) -> None:
        assert store.memory is not None
        self._device = device
        self._memory = store.memory
        self._kernels = TorchKernels()

    def fetch(self, stream: Any, out: Tensor, rows: Tensor, host_rows: NDArray[np.int64] | None) -> Task:
        del host_rows
        with self._device.use(stream):
            self._device.launch("fetch", lambda: self._kernels.gather(out, self._memory, rows), reads=[rows], writes=[out])
        yield from ()

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        yield from ()
        with self._device.use(stream):
            self._device.launch(
                "drain",
                lambda: _drain_resident(self._memory, listed),
                reads=[listed.rows, listed.column, listed.marks],
            )
            return None, self._device.record(stream)

    def bind(self, host: Host) -> None:
        del host

    def held(self) -> int:
        return 0


@final
class Crossed:
    """One mover's way in and another's way out."""

    def __init__(self, reading: Mover, writing: Mover) -> None:
        self.name = f"{reading.name} in, {writing.name} out"
        self.wants_host_rows = reading.wants_host_rows
        self.lands_on_host = writing.lands_on_host
        self.fetch = reading.fetch
        self.drain = writing.drain
        self._both = (reading, writing)

    def bind(self, host: Host) -> None:
        for mover in self._both:
            mover.bind(host)

    def held(self) -> int:
        return sum(mover.held() for mover in self._both)


def _drain_resident(memory: Tensor, listed: DrainList) -> None:
    """``memory[rows] = column`` where marked; unmarked places write back what the store has, so no size is needed."""
    rows = listed.rows.to(torch.int64)
    column = as_ints(listed.column)
    target = as_ints(memory)
    marked = listed.marks.bool().view(-1, *(1,) * (column.dim() - 1))
    target.index_copy_(0, rows, torch.where(marked, column, target.index_select(0, rows)))
