"""Plans a window on the plan stream: takes requests, counts distinct rows, cuts at the last batch that fits, lays out.

A task of the producer. One small array crosses back to the host a window; all sizes follow from it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._chunk_order import joined
from ._flight import Request, TableWindow, Window
from ._ids import bring_ids, id_dtype
from ._run import Run
from ._runs import runs_of
from ._staging import typed
from ._trial import WINDOW_BYTES
from ._window import Layout, Older, Sorted

WINDOW_ROWS = 4 << 20  # a window of about a million rows reaches the link's limit; more only costs memory


@dataclass
class Growth:
    """How many batches the next window takes: doubling, bounded by what the last one needed of a slot."""

    batches: int = 0
    bytes_a_batch: float = 0.0
    rows_a_batch: float = 0.0

    def next(self, nbytes: int, lookahead: int) -> int:
        """A guess, of ``nbytes`` at most; the plan cuts what does not fit a slot."""
        if not self.batches:
            return 1
        room = nbytes / max(self.bytes_a_batch, 1.0)
        most = WINDOW_ROWS / max(self.rows_a_batch, 1.0)
        return max(1, min(lookahead, 2 * self.batches, int(room), int(most)))

    def learn(self, batches: int, nbytes: int, rows: int) -> None:
        """What a window of ``batches`` needed."""
        self.batches, self.bytes_a_batch, self.rows_a_batch = batches, nbytes / batches, rows / batches


def plan_window(run: Run, number: int, growth: Growth) -> Generator[Any, None, Window | None]:
    """The plan of window ``number``; None when there are no more batches (or none before an error).

    Raises ValueError when one batch alone does not fit a slot.
    """
    arenas = run.parts.arenas
    trying = any(mover.trying for movers in run.parts.movers for mover in movers)
    most = min(arenas.slot_bytes, WINDOW_BYTES) if trying else arenas.slot_bytes
    wanted = growth.next(most, run.parts.settings.lookahead)
    requests = _take(run, wanted)
    if not requests:
        return None
    older = _older(run, number)
    tables = [_Counting(run, position, requests, older) for position in range(len(run.parts.source.tables))]
    for table in tables:
        yield from table.count()
    fitting = _fitting(run, tables, requests)
    if fitting < len(requests):
        with run.host.lock:
            run.backlog.extendleft(reversed(requests[fitting:]))
        requests = requests[:fitting]
    parts = []
    for table in tables:
        parts.append((yield from table.arrange(fitting)))
    planned = run.parts.device.record(run.parts.streams.plan, timing=True)
    growth.learn(fitting, arenas.needed([part.distinct for part in parts]), max(part.distinct for part in parts))
    if any(table.host_rows is not None for table in tables):
        yield planned
        for table, part in zip(tables, parts, strict=True):
            part.fetch_rows = table.finish_host_rows()
    return Window(number, requests, parts, planned)


def _take(run: Run, wanted: int) -> list[Request]:
    """Up to ``wanted`` requests. An error of the sampler waits behind the batches before it."""
    missing = wanted - len(run.backlog)
    if missing > 0 and not run.taken_all and run.pending_error is None:
        with run.parts.timeline.phase("sampler"):
            requests, ended, error = run.requests.take(run.parts.streams.plan, missing)
        with run.host.lock:
            run.backlog.extend(requests)
            run.taken_all = ended
            run.pending_error = error
    if run.backlog and run.backlog[0].number < run.single_until:
        wanted = 1
    with run.host.lock:
        return [run.backlog.popleft() for _ in range(min(wanted, len(run.backlog)))]


def _older(run: Run, number: int) -> list[Window]:
    """Windows that rows may be carried from, newest first; none when rows are not fetched."""
    if not run.parts.settings.fetch:
        return []
    return [run.windows[source] for source in reversed(run.slots.candidates(number)) if source in run.windows]


def _fitting(run: Run, tables: Sequence[_Counting], requests: Sequence[Request]) -> int:
    """How many of the batches fit one slot.

    Raises:
        ValueError: not even the first.
    """
    arenas = run.parts.arenas
    for batches in range(len(requests), 0, -1):
        if arenas.fits([table.distinct(batches) for table in tables]):
            return batches
    needed = arenas.needed([table.distinct(1) for table in tables])
    rows = {table.table.name: table.distinct(1) for table in tables}
    raise ValueError(
        f"batch {requests[0].number} has {rows} distinct rows, which take {needed} bytes; a slot has {arenas.slot_bytes}. "
        f"Pass staging_bytes={needed * arenas.depth} or more, or smaller batches"
    )


class _Counting:
    """One table of a window while it is planned."""

    def __init__(self, run: Run, position: int, requests: Sequence[Request], older: Sequence[Window]) -> None:
        self._run = run
        self._device = run.parts.device
        self._stream = run.parts.streams.plan
        self._requests = requests
        self._position = position
        self.table = run.parts.source.tables[position]
        self.ends = np.cumsum([request.asked[position].count for request in requests]).tolist()
        layouts = [(window.number, window.tables[position].layout) for window in older]
        self._older = [(source, layout) for source, layout in layouts if layout is not None]
        self._counts: Any = None
        self.host_rows: Tensor | None = None
        self._host_buffer: Tensor | None = None

    def count(self) -> Generator[Any, None, None]:
        """Upload the ids, sort and count them, and read the counts back."""
        total = self.ends[-1]
        batches = len(self.ends)
        if not total:
            self._counts = np.zeros((2 + len(self._older), batches), np.int64)
            return
        device, pool = self._device, self._run.parts.pool
        dtype = id_dtype(self.table.rows)
        lines = 2 + len(self._older)
        readback = pool.take(8 * lines * batches)
        host_counts = typed(readback, torch.int64, (lines, batches))
        with device.use(self._stream):
            self._ids = device.empty((total,), dtype)
            asked = [request.asked[self._position] for request in self._requests]
            bring_ids(device, pool, self._stream, self._run.parts.permute, asked, self._ids)
            self._ends, lease = self._upload(torch.tensor(self.ends))
            self._sorted = Sorted(device.empty((total,), dtype), device.empty((total,), torch.int64))
            counts = device.empty((lines, batches), torch.int64)
            self._launch_count(self._ids, self._ends, self._sorted, counts)
            device.copy(host_counts, counts)
            event = device.record(self._stream)
        pool.give(lease, event)
        yield event
        device.host_reads(host_counts)
        self._counts = host_counts.numpy().copy()
        pool.give(readback, None)

    def distinct(self, batches: int) -> int:
        """Distinct rows of the first ``batches`` batches."""
        return int(self._counts[:-1, batches - 1].sum())

    def arrange(self, batches: int) -> Generator[Any, None, TableWindow]:
        """Lay out the first ``batches`` batches."""
        yield from ()
        ends = self.ends[:batches]
        sizes = self._counts[:-1, batches - 1].tolist()
        pair_ends = self._counts[-1, :batches].tolist()
        total, distinct = ends[-1], sum(sizes)
        sources = []
        start = sizes[0]
        for (source, _), size in zip(self._older, sizes[1:], strict=True):
            if size:
                sources.append((source, start, start + size))
            start += size
        device = self._device
        if not total:
            with device.use(self._stream):
                return TableWindow(ends, pair_ends, device.empty((0,), torch.int64), 0, 0, [], None)
        with device.use(self._stream):
            if batches < len(self.ends):  # cut: the rows of later batches must not take places
                scratch = device.empty((self._counts.shape[0], batches), torch.int64)
                self._sorted = Sorted(device.empty((total,), self._ids.dtype), device.empty((total,), torch.int64))
                self._launch_count(self._ids[:total], self._ends[:batches], self._sorted, scratch)
            layout = self._empty_layout(total, distinct, sizes, pair_ends[-1])
            sorted_, kept_ends = self._sorted, self._ends[:batches]
            olders, plan = [older.older for _, older in self._older], self._run.parts.plan
            device.launch(
                "arrange",
                lambda: plan.arrange(sorted_, kept_ends, olders, sizes, layout),
                reads=[sorted_.ids, sorted_.order, kept_ends, *_tensors(olders)],
                writes=layout.tensors(),
            )
            part = TableWindow(ends, pair_ends, self._ids[:total], distinct, sizes[0], sources, layout)
            if not sources:
                part.runs = runs_of((request.asked[self._position] for request in self._requests[:batches]), distinct)
            if self._run.parts.arenas.lends:
                part.mixed = joined([request.asked[self._position].positions for request in self._requests[:batches]])
            self._start_host_rows(part, layout)
        return part

    def finish_host_rows(self) -> Any:
        """The fetched rows as an int64 array, after the plan's event has passed."""
        if self.host_rows is None or self._host_buffer is None:
            return None
        self._device.host_reads(self.host_rows)
        rows = self.host_rows.numpy().astype(np.int64)
        self._run.parts.pool.give(self._host_buffer, None)
        return rows

    def _start_host_rows(self, part: TableWindow, layout: Layout) -> None:
        wanted = self._run.parts.settings.fetch and any(
            mover.wants_host_rows for mover in self._run.parts.movers[self._position]
        )
        if wanted and part.fetched:
            self._host_buffer = self._run.parts.pool.take(part.fetched * layout.rows.element_size())
            self.host_rows = typed(self._host_buffer, layout.rows.dtype, (part.fetched,))
            self._device.copy(self.host_rows, layout.rows[: part.fetched])

    def _launch_count(self, ids: Tensor, ends: Tensor, out: Sorted, counts: Tensor) -> None:
        olders, plan = [layout.older for _, layout in self._older], self._run.parts.plan
        self._device.launch(
            "count",
            lambda: plan.count(ids, ends, olders, out, counts),
            reads=[ids, ends, *_tensors(olders)],
            writes=[out.ids, out.order, counts],
        )

    def _empty_layout(self, total: int, distinct: int, sizes: Sequence[int], pairs: int) -> Layout:
        device, dtype = self._device, self._ids.dtype
        writable = self._run.parts.settings.writable
        return Layout(
            rows=device.empty((distinct,), dtype),
            places=device.empty((total,), torch.int64),
            older=Older(device.empty((distinct,), dtype), device.empty((distinct,), torch.int64)),
            carried=tuple(device.empty((size,), torch.int64) for size in sizes[1:]),
            batch_places=device.empty((pairs,), torch.int64) if writable else None,
            inverse=device.empty((total,), torch.int64) if writable else None,
        )

    def _upload(self, host: Tensor) -> tuple[Tensor, Tensor]:
        view, lease = self._run.parts.pool.upload(host)
        out = self._device.empty(tuple(host.shape), host.dtype)
        self._device.copy(out, view)
        return out, lease


def _tensors(olders: Sequence[Older]) -> list[Tensor]:
    return [tensor for older in olders for tensor in (older.rows, older.places)]
