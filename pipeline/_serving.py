"""Gather a batch from its slot into the user's tensors, and scatter changed rows back into it.

Called by the user's thread, on its current stream. Every tensor that the user receives is allocated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from rowferry.stores._bytes import as_ints, gather_rows
from rowferry.stores._casts import cast, castable
from rowferry.stores._device_contract import Device

from . import _marks
from ._containers import map_leaves
from ._flight import Request, TableWindow, Window
from ._overflow import Overflow, made_inf
from ._run import Run
from ._source import Column

GROUP_BYTES = 32 << 20  # batches smaller than this are gathered together: a launch costs more than they do


@dataclass(slots=True)
class Taken:
    """One batch's tensors, a list entry a table.

    Attributes:
        index: gives the rows asked for, int64, in the index's shape; called once at most, on whatever stream is current.
        columns: a tensor a column: rows in the order asked for, cast; of a writable batch its distinct rows, uncast.
        rows, inverse: of a writable batch only: its distinct rows, and the place of each asked one among them.
    """

    window: Window | None
    batch: int
    request: Request
    item: Any
    index: list[Callable[[], Tensor]] = field(default_factory=list)
    columns: list[list[Tensor]] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    inverse: list[Tensor] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class Asking:
    """The rows that a batch asked for, to be copied for the user when he looks at them: few training loops do.

    There is nothing to wait for: the plan has read back what it counted of these very ids. Holds the window's ids and
    nothing else of it: a batch that is kept must not keep a slot.
    """

    device: Device
    ids: Tensor
    span: tuple[int, int]
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        """int64, of ``shape``, a tensor of its own, ready on the current stream."""
        start, stop = self.span
        self.device.keep(self.ids, self.device.current())
        return _integers(self.device, self.ids[start:stop]).view(self.shape)


@dataclass(slots=True)
class Group:
    """Small batches of a read-only window, gathered by one launch; each is a part of it.

    Attributes:
        first: batches ``first``, ``first + 1``, ... of the window.
        stream: where it was gathered; another stream gathers anew, for its tensors must come from its own pool.
        columns: by batch, table and column, the rows.
    """

    first: int
    stream: Any
    columns: list[list[list[Tensor]]]


def serve(run: Run, stream: Any, window: Window, batch: int) -> Taken:
    """The ``batch``-th batch of ``window``, ready on ``stream``, which is current."""
    request, tables = window.requests[batch], run.parts.source.tables
    taken = Taken(window, batch, request, _item(run, stream, request))
    for part, asked in zip(window.tables, request.asked, strict=True):
        taken.index.append(Asking(run.parts.device, part.ids, part.span(batch), asked.shape))
    if run.parts.settings.writable:
        for part, asked in zip(window.tables, request.asked, strict=True):
            _serve_distinct(run, taken, part, asked.shape)
    else:
        group: Group | None = window.group
        if group is None or not 0 <= batch - group.first < len(group.columns) or group.stream != stream:
            group = window.group = _gather(run, stream, window, batch)
        taken.columns = group.columns[batch - group.first]
    for asked, table in zip(request.asked, tables, strict=True):
        run.parts.counters.served(asked.count, asked.count * table.row_nbytes)
    run.parts.counters.batches += 1
    return taken


def _gather(run: Run, stream: Any, window: Window, first: int) -> Group:
    """The batches from ``first`` on that are served together, gathered now."""
    device, tables = run.parts.device, run.parts.source.tables
    most = GROUP_BYTES if device.asynchronous else 0  # where a launch costs nothing, each batch has memory of its own
    last, nbytes = first, 0
    for request in window.requests[first:]:
        nbytes += sum(one.count * table.row_nbytes for one, table in zip(request.asked, tables, strict=True))
        if last > first and nbytes > most:
            break
        last += 1
    columns = []
    for number, (table, part) in enumerate(zip(tables, window.tables, strict=True)):
        start, stop = part.span(first)[0], part.span(last - 1)[1]
        places = part.layout.places[start:stop] if part.layout else None
        shapes = [request.asked[number].shape for request in window.requests[first:last]]
        found = []
        for source, column in zip(_columns(part), table.columns, strict=True):
            if run.parts.arenas.lends and column.dtype == source.dtype:
                found.append(_parts(source[start:stop], shapes))  # in order, so places are what was asked for
                continue
            rows = _pick(device, source, places, stop - start, column.dtype, exact=True, overflow=run.parts.counters.overflow)
            found.append(_parts(rows, shapes))
        columns.append(list(map(list, zip(*found, strict=True))))
    return Group(first, stream, list(map(list, zip(*columns, strict=True))))


def _parts(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """The memory of ``rows``, one part after the other, each with one of ``shapes`` in place of its first dimension.

    Not views, as far as autograd knows: these count changes in place together, and a batch that is changed would spoil what
    a graph saved of another one; and one that was made in ``no_grad`` refuses to be changed by what has a gradient. That is
    what the split is "unsafe" for, and ``data``.
    """
    parts: Sequence[Tensor] = [rows]
    if len(shapes) > 1:
        parts = torch.unsafe_split_with_sizes(rows, [math.prod(shape) for shape in shapes])
        if all(len(shape) == 1 for shape in shapes):
            return parts
    return [part.view((*shape, *part.shape[1:])).data for part, shape in zip(parts, shapes, strict=True)]


def check_values(rows: Any, column: Column, count: int, device: Device) -> None:
    """Refuse values that do not fit a batch of ``count`` distinct rows, before anything is launched."""
    shape = (count, *column.store.row_shape)
    if not isinstance(rows, Tensor):
        raise TypeError(f"values for {column.label} must be a tensor, not {type(rows).__name__}")
    if tuple(rows.shape) != shape:
        raise ValueError(
            f"values for {column.label} have shape {tuple(rows.shape)}; this batch has {count} distinct rows: {shape}"
        )
    if rows.device != device.torch:
        raise ValueError(f"values for {column.label} are on {rows.device}; the pipeline's rows are on {device.torch}")
    castable(rows.dtype, column.store.dtype)


def write(run: Run, stream: Any, window: Window, batch: int, values: Mapping[tuple[int, int], Tensor]) -> None:
    """Scatter a batch's rows, by (table, column), into its slot and mark them, in the order of ``stream``, which is current.

    All rounding to the stores' dtypes happens here. ``values`` were checked, and may be dropped as soon as this returns.
    """
    device = run.parts.device
    for (table, column), rows in values.items():
        part = window.tables[table]
        start, stop = part.pair_span(batch)
        if start == stop:
            continue
        assert part.layout is not None
        assert part.layout.batch_places is not None
        assert part.carved is not None
        places, rows = part.layout.batch_places[start:stop], rows.detach()
        _put(device, part.carved.columns[column], places, rows, run.parts.counters.overflow)
        _marks.mark(device, part.carved.marks[column], places)
        device.keep(rows, stream)
        window.marked.add((table, column))
        window.written_back.setdefault((table, column), set()).add(batch)


def empty_rows(device: Device, count: int, row_shape: Sequence[int], dtype: torch.dtype, *, exact: bool) -> Tensor:
    """Fresh rows. With sizes that change at every batch, rounded up to an eighth of a power of two and narrowed, so that
    the allocator finds its blocks again."""
    if exact or count < 16:
        return device.empty((count, *row_shape), dtype)
    step = 1 << max(count.bit_length() - 4, 0)
    return device.empty((-(-count // step) * step, *row_shape), dtype)[:count]


def _serve_distinct(run: Run, taken: Taken, part: TableWindow, shape: tuple[int, ...]) -> None:
    """The distinct rows of a writable batch, in the stores' dtypes."""
    device, layout = run.parts.device, part.layout
    start, stop = part.span(taken.batch)
    first, last = part.pair_span(taken.batch)
    if layout is None or layout.inverse is None or layout.batch_places is None:
        taken.inverse.append(device.empty(shape, torch.int64))
        taken.rows.append(device.empty((0,), torch.int64))
        places = None
    else:
        places = layout.batch_places[first:last]
        taken.inverse.append(_integers(device, layout.inverse[start:stop]).view(shape))
        taken.rows.append(_rows_at(device, layout.rows, places))
    fetched = places if run.parts.settings.fetch else None
    taken.columns.append([_pick(device, source, fetched, last - first, source.dtype, exact=False) for source in _columns(part)])


def _put(device: Device, target: Tensor, places: Tensor, rows: Tensor, overflow: Overflow | None) -> None:
    """``target[places] = rows``, rounded to ``target``'s dtype."""
    total = overflow.total() if overflow is not None and rows.dtype != target.dtype else None

    def put() -> None:
        rounded = cast(rows, target.dtype)
        as_ints(target).index_copy_(0, places, as_ints(rounded))
        if total is not None:
            total.add_(made_inf(rows, rounded))

    counts = [] if total is None else [total]
    device.launch("write", put, reads=[rows, places, target, *counts], writes=[target, *counts])


def _columns(part: TableWindow) -> tuple[Tensor, ...]:
    assert part.carved is not None
    return part.carved.columns


def _pick(
    device: Device,
    source: Tensor,
    places: Tensor | None,
    count: int,
    dtype: torch.dtype,
    *,
    exact: bool,
    overflow: Overflow | None = None,
) -> Tensor:
    """``source[places]`` cast to ``dtype``, in a fresh tensor; uninitialised without ``places``."""
    out = empty_rows(device, count, source.shape[1:], dtype, exact=exact)
    if count and places is not None:
        total = overflow.total() if overflow is not None and dtype != source.dtype else None
        if dtype == source.dtype:

            def pick() -> None:
                if device.asynchronous:
                    torch.index_select(as_ints(source), 0, places, out=as_ints(out))
                else:  # torch would wait for a pool of threads, which the producer keeps from the cores
                    gather_rows(source, places.numpy(), out)
        else:

            def pick() -> None:
                chosen = as_ints(source).index_select(0, places).view(source.dtype)
                out.copy_(cast(chosen, dtype))
                if total is not None:
                    total.add_(made_inf(chosen, out))

        counts = [] if total is None else [total]
        device.launch("serve", pick, reads=[source, places, *counts], writes=[out, *counts])
    return out


def _rows_at(device: Device, rows: Tensor, places: Tensor) -> Tensor:
    out = device.empty(tuple(places.shape), torch.int64)
    if places.numel():
        device.launch("rows", lambda: out.copy_(rows[places]), reads=[rows, places], writes=[out])
    return out


def _integers(device: Device, source: Tensor) -> Tensor:
    """An int64 copy that belongs to the user."""
    out = device.empty(tuple(source.shape), torch.int64)
    if source.numel():
        device.launch("index", lambda: out.copy_(source), reads=[source], writes=[out])
    return out


def _item(run: Run, stream: Any, request: Request) -> Any:
    """The item's tensors on the device, by copies that do not block. On a CPU the item as it is."""
    device = run.parts.device
    if not device.asynchronous or not request.walk:
        return request.item

    def arrive(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device.torch, non_blocking=True) if hasattr(leaf, "to") else leaf
        if device.holds(leaf):
            device.keep(leaf, stream)
            return leaf
        out = device.empty(tuple(leaf.shape), leaf.dtype)
        if leaf.numel():
            device.copy(out, leaf)
        return out

    item = map_leaves(request.item, arrive)
    if request.pinned:
        passed = device.record(stream)
        for buffer in request.pinned:
            run.parts.pool.give(buffer, passed)
    return item
