"""The ways rows cross: one mover a column, with a fetch into the slot and a drain out of it.

Called by the producer (``fetch``) and the writer (``drain``), each on a stream of its own, which they make current
around every launch. Both are tasks: they yield what the host must wait for. ``_chosen.py`` picks one a window.
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
from rowferry.stores._casts import cast
from rowferry.stores._device_contract import Device, Event

from ._chunk_order import Mixed
from ._engine import Host, Task
from ._runs import Runs, are_few, copy_in, copy_out


class Kernels(Protocol):
    """Row copies by a kernel, on the current stream. ``RowKernels`` on CUDA, ``TorchKernels`` elsewhere."""

    def gather(self, out: Tensor, source: Tensor, rows: Tensor) -> None:
        """``out[i] = source[rows[i]]``."""

    def scatter(
        self,
        target: Tensor,
        rows: Tensor,
        values: Tensor,
        *,
        places: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> None:
        """``target[rows[i]] = values[i]`` where ``marks[i]``."""


@final
class TorchKernels:
    """The same by torch operators, for devices without CUDA. The meaning of the kernels, and their oracle."""

    def gather(self, out: Tensor, source: Tensor, rows: Tensor) -> None:
        torch.index_select(as_ints(source), 0, rows, out=as_ints(out))

    def scatter(
        self,
        target: Tensor,
        rows: Tensor,
        values: Tensor,
        *,
        places: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> None:
        rows = rows.to(torch.int64)
        values = values if places is None else values[places]
        if marks is not None:
            rows, values = rows[marks.bool()], values[marks.bool()]
        as_ints(target).index_copy_(0, rows, as_ints(values))


def pick_rows(device: Device, name: str, column: Tensor, places: Tensor, *, out: Tensor) -> None:
    """Launch ``out = column[places]`` as ``name`` on the current stream: bit for bit, or cast where dtypes differ."""
    if out.dtype == column.dtype:

        def pick() -> None:
            torch.index_select(as_ints(column), 0, places, out=as_ints(out))
    else:

        def pick() -> None:
            out.copy_(cast(as_ints(column).index_select(0, places).view(column.dtype), out.dtype))

    device.launch(name, pick, reads=[column, places], writes=[out])


@dataclass(frozen=True)
class FetchList:
    """Rows of one column that come from the store.

    Attributes:
        rows: ``(k,)``, ascending but with ``mixed``, on the device.
        host: the same on the host, where a mover of the table wants them there.
        runs: the same as runs, where the host knows them.
        mixed: the rows are those at these places of a chunk shuffle, in that order.
    """

    rows: Tensor
    host: NDArray[np.int64] | None = None
    runs: Runs | None = None
    mixed: Mixed | None = None


@dataclass(frozen=True)
class DrainList:
    """Rows of one column that go to the store.

    Attributes:
        column: the slot's column ``(d, *row_shape)``.
        marks: uint8 ``(d,)``, nonzero for rows that go; belongs to this list.
        rows: the row of each place, ``(d,)``.
        ascending: the rows in order ``(d,)``, and ``places`` where each lies, int64 ``(d,)``.
        runs: all rows of the column, as runs in the order of their places, where the host knows that all of them may go,
            marked or not (each holds what its store shall hold); else None.
    """

    column: Tensor
    marks: Tensor
    rows: Tensor
    ascending: Tensor
    places: Tensor
    runs: Runs | None = None


class Mover(Protocol):
    """How one column's rows cross. Properties may change from window to window; each is read just before it counts."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def why(self) -> str:
        """Why rows cross this way, in words."""

    @property
    def wants_host_rows(self) -> bool:
        """Whether ``fetch`` needs the rows of the next window to be planned on the host."""

    def holds(self, *, host_rows: bool) -> torch.dtype:
        """What the slot's column must be of for the next ``fetch``, with or without rows on the host."""

    def fetch(self, stream: Any, out: Tensor, wanted: FetchList) -> Task:
        """Fill ``out`` ``(k, *row_shape)``, of dtype ``holds(...)``, with the store's rows, in ``stream``'s order."""

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        """Write the listed rows to the store, in ``stream``'s order: host threads write after what was launched on it before.

        Returns rows moved (None: not known to the host) and the event of a landing by the device (None: a landing by the
        host, which is over when this returns)."""

    def bind(self, host: Host) -> None:
        """An epoch begins: ``host`` runs its threads."""

    def rest(self) -> None:
        """Another mover does its work from now on: memory that can be had again is given up. Between epochs."""

    def held(self) -> int:
        """Bytes of pinned memory held."""

    @property
    def trying(self) -> bool:
        """Whether it still finds out how to move rows, for which small windows do."""


@final
class ZeroCopy:
    """A kernel with few blocks reads and writes rows of pinned memory over the bus, in sorted order.

    Rows that are few long runs go by the copy engine, without a kernel.
    """

    name = "zero-copy"
    why = "a kernel reads pinned rows over the link, no host thread touches them"
    wants_host_rows = False
    trying = False

    def __init__(self, device: Device, memory: Tensor, kernels: Kernels) -> None:
        self._device = device
        self._memory = memory
        self._kernels = kernels

    def holds(self, *, host_rows: bool) -> torch.dtype:
        del host_rows
        return self._memory.dtype

    def fetch(self, stream: Any, out: Tensor, wanted: FetchList) -> Task:
        rows = wanted.rows
        with self._device.use(stream):
            if wanted.runs is not None and are_few(wanted.runs, out):
                copy_in(self._device, self._memory, wanted.runs, out)
            else:
                self._device.launch("fetch", lambda: self._kernels.gather(out, self._memory, rows), reads=[rows], writes=[out])
        yield from ()

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        total = None
        with self._device.use(stream):
            if listed.runs is not None and are_few(listed.runs, listed.column):
                copy_out(self._device, listed.column, listed.runs, self._memory)
                total = len(listed.column)
            else:
                self._device.launch(
                    "drain",
                    lambda: self._kernels.scatter(self._memory, listed.rows, listed.column, marks=listed.marks),
                    reads=[listed.rows, listed.column, listed.marks],
                )
            event = self._device.record(stream)
        yield from ()
        return total, event

    def bind(self, host: Host) -> None:
        del host

    def rest(self) -> None:
        pass

    def held(self) -> int:
        return 0


@final
class Resident:
    """The store is on the device: nothing crosses."""

    name = "local"
    why = "nothing has to cross"
    wants_host_rows = False
    trying = False

    def __init__(self, device: Device, store: Store) -> None:
        assert store.memory is not None
        self._device = device
        self._memory = store.memory
        self._kernels = TorchKernels()

    def holds(self, *, host_rows: bool) -> torch.dtype:
        del host_rows
        return self._memory.dtype

    def fetch(self, stream: Any, out: Tensor, wanted: FetchList) -> Task:
        rows = wanted.rows
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

    def rest(self) -> None:
        pass

    def held(self) -> int:
        return 0


def _drain_resident(memory: Tensor, listed: DrainList) -> None:
    """``memory[rows] = column`` where marked; unmarked places write back what the store has, so no size is needed."""
    rows = listed.rows.to(torch.int64)
    column = as_ints(listed.column)
    target = as_ints(memory)
    marked = listed.marks.bool().view(-1, *(1,) * (column.dim() - 1))
    target.index_copy_(0, rows, torch.where(marked, column, target.index_select(0, rows)))
