"""What is in flight: a batch as it was asked for, and a window of batches on its way through a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores._device_contract import Event

from ._chunk_order import Mixed
from ._passage import Passage
from ._sampling import Positions
from ._staging import Carved
from ._window import Layout


@dataclass(slots=True, eq=False)
class Snapshot:
    """Ids of one or more batches in pinned memory, one after the other.

    Attributes:
        buffer: the pool's; ``ids`` is a view of it, and ``host`` the same memory for NumPy.
        filled: ids that are taken, from the first on.
        uses: batches that hold a part of it.
    """

    buffer: Tensor
    ids: Tensor
    host: NDArray[Any]
    filled: int = 0
    uses: int = 0


@dataclass(slots=True)
class Asked:
    """The rows that one batch asks of one table: checked, in ``[0, rows)``, C order, ``count`` of them.

    Exactly one is set, until the window's fetch is under way: ``host`` (int32 or int64, 1-d, ours: with ``snapshot`` it is
    the part of that from ``start`` on), ``device`` (int64, 1-d, ours, ready on the plan stream), or ``positions`` of a
    built-in order or a chunk shuffle, not yet evaluated.
    """

    shape: tuple[int, ...]
    count: int
    host: NDArray[Any] | None
    device: Tensor | None = None
    positions: Positions | Mixed | None = None
    snapshot: Snapshot | None = None
    start: int = 0


@dataclass(slots=True)
class Request:
    """One batch as the sampler gave it.

    Attributes:
        number: which batch of the epoch, from 0.
        item: what the batch sampler yielded, host tensors pinned (None for the built-in samplers).
        asked: one a table.
        state: the foreign sampler's ``state_dict`` after this batch, if it has one.
        pinned: buffers of the pool that ``item``'s tensors live in; given back once they are on the device.
        walk: the item may hold tensors (a plain list of row numbers is never walked).
    """

    number: int
    item: Any
    asked: tuple[Asked, ...]
    state: Any = None
    pinned: Sequence[Tensor] = ()
    walk: bool = False


@dataclass
class TableWindow:
    """One table's part of a window.

    Attributes:
        ends: where each batch's ids end in ``ids``, and ``pair_ends`` its distinct rows in ``layout.batch_places``.
        ids: the ids asked for, ``(n,)``, int32 or int64, on the device.
        distinct: rows of the slot; the first ``fetched`` come from the store.
        sources: windows that the rest is carried from, as (window, first place, end place), in slot order.
        fetch_rows: the fetched rows on the host, where a mover wants them there.
        runs: all rows of the slot as runs, in the order of their places, when they come from the store and the host knows.
        mixed: the places of the slot in a chunk shuffle, where its rows lie in that order.
        carved: the slot's columns and marks; set when the slot is claimed.
    """

    ends: list[int]
    pair_ends: list[int]
    ids: Tensor
    distinct: int
    fetched: int
    sources: list[tuple[int, int, int]]
    layout: Layout | None
    fetch_rows: NDArray[np.int64] | None = None
    runs: tuple[tuple[int, int], ...] | None = None
    mixed: Mixed | None = None
    carved: Carved | None = None

    def span(self, batch: int) -> tuple[int, int]:
        """Where the ids of the window's ``batch``-th batch lie."""
        return (self.ends[batch - 1] if batch else 0), self.ends[batch]

    def pair_span(self, batch: int) -> tuple[int, int]:
        """Where its distinct rows lie."""
        return (self.pair_ends[batch - 1] if batch else 0), self.pair_ends[batch]

    def tensors(self) -> list[Tensor]:
        """Every plan tensor, all allocated on the plan stream."""
        return [self.ids, *(self.layout.tensors() if self.layout else ())]


@dataclass
class Window:
    """The next batches, planned and fetched together. Its points are events; which were passed is in ``Slots``.

    Attributes:
        planned: the plan's tensors are whole (plan stream).
        ready: the slot holds what comes from the store (fetch stream), and in a read-only pipeline what is carried.
        written: nothing more is served from the slot or written to it (consumer's stream).
        landed: events of kernels that write its rows to the store (writer stream).
        vacated: events after which a later window has copied rows from it.
        marked: columns (table, column) that ``write_back`` touched since the last drain list.
        written_back: the batches (by place in the window) whose rows of a column (table, column) were written back.
        group: the small batches that were gathered together last (``_serving.Group``).
        passage: what was noted on its way here, for the account of time.
    """

    number: int
    requests: list[Request]
    tables: list[TableWindow]
    planned: Event
    ready: Event | None = None
    written: Event | None = None
    landed: list[Event] = field(default_factory=list)
    vacated: list[Event] = field(default_factory=list)
    marked: set[tuple[int, int]] = field(default_factory=set)
    written_back: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    group: Any = None
    passage: Passage = field(default_factory=Passage)

    def changed_whole(self, table: int, column: int) -> bool:
        """Whether every batch that has rows of the table was written back in this column: each row is as it shall be."""
        parts = self.tables[table]
        written = self.written_back.get((table, column), ())
        return all(batch in written or len(set(parts.pair_span(batch))) == 1 for batch in range(len(self.requests)))

    @property
    def source_windows(self) -> set[int]:
        """Windows that rows are carried from."""
        return {source for table in self.tables for source, _, _ in table.sources}
