"""The producer: plan a window, claim a slot, fetch, publish. Functions; the engine owns the thread.

The plan of window w is made while w - 1 is being fetched: on a stream of its own, before w's slot is free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _marks
from ._engine import Task
from ._flight import TableWindow, Window
from ._movers import FetchList, pick_rows
from ._planner import Growth, plan_window
from ._run import DrainJob, Run


def produce(run: Run) -> Task:
    """Plan and fill windows until the sampler ends, something fails or the run is closing."""
    growth, timeline = Growth(), run.parts.timeline
    number = 0
    while True:
        yield run.may_plan(number)
        if run.closing:
            return
        passage = timeline.begin(number)
        try:
            with timeline.phase("plan"):
                window = yield from plan_window(run, number, growth)
        except Exception as error:
            _fail(run, error)
            return
        if window is None:
            _finish(run, number)
            return
        window.passage, passage.planned = passage, window.planned
        with run.host.lock:
            run.windows[number] = window
            run.slots.plan(number, window.source_windows)
        with timeline.phase("slot"):
            yield run.may_claim(number)
        if run.closing:
            return
        try:
            with timeline.phase("fetch"):
                yield from _fill(run, window)
        except Exception as error:
            if not _replan(run, window, error):
                return
            continue
        run.host.notify()
        for request in window.requests:
            run.requests.done(request)
        number += 1


def _fill(run: Run, window: Window) -> Task:
    """Take the slot over and bring in what comes from the store; in a read-only pipeline also what is carried."""
    device, stream = run.parts.device, run.parts.streams.fetch
    settings = run.parts.settings
    with run.host.lock:
        before = run.windows.pop(window.number - settings.depth, None)
        run.slots.claim(window.number)
    with device.use(stream):
        if before is not None:
            for event in (before.written, *before.landed, *before.vacated):
                if event is not None:
                    device.wait(stream, event)
        device.wait(stream, window.planned)
        run.parts.timeline.start_fetch(window.passage, stream, after_drain=before is not None and before.passage.drained)
        for table in window.tables:
            for tensor in table.tensors():
                device.keep(tensor, stream)
        carved = run.parts.arenas.carve(window.number, [table.distinct for table in window.tables], _held(run, window))
        for table, part in zip(window.tables, carved, strict=True):
            table.carved = part
            for marks in part.marks if table.distinct else ():
                _marks.clear(device, marks)
    if before is not None:
        run.landings = [event for event in (*run.landings, *before.landed) if not event.query()]
    if settings.fetch and _reads_on_host(run):
        for event in run.landings:
            yield event  # host threads read the rows that kernels wrote, of windows longer ago than this slot's too
    if settings.fetch:
        for position, table in enumerate(window.tables):
            yield from _fetch(run, window, position, table)
    if not settings.writable:
        with device.use(stream):
            carry(run, window)
    ready = device.record(stream, timing=True)
    run.parts.timeline.end_fetch(window.passage, ready, host_rows=any(table.fetch_rows is not None for table in window.tables))
    with run.host.lock:
        window.ready = ready  # with the slot's point: the consumer goes by this
        run.slots.fill(window.number)
        if not settings.writable:
            run.slots.copied(window.number)


def _held(run: Run, window: Window) -> list[list[torch.dtype]]:
    """What the columns of a window's slot are of, by table."""
    return [
        [mover.holds(host_rows=table.fetch_rows is not None) for mover in movers]
        for movers, table in zip(run.parts.movers, window.tables, strict=True)
    ]


def _fetch(run: Run, window: Window, position: int, table: TableWindow) -> Task:
    """The rows of one table that come from its stores."""
    if not table.fetched or table.layout is None or table.carved is None:
        return
    wanted = FetchList(table.layout.rows[: table.fetched], table.fetch_rows, table.runs, table.mixed)
    for mover, column, out in zip(
        run.parts.movers[position], run.parts.source.tables[position].columns, table.carved.columns, strict=True
    ):
        try:
            yield from mover.fetch(run.parts.streams.fetch, out[: table.fetched], wanted)
        except Exception as error:
            error.add_note(f"while fetching {table.fetched} rows of {column.label} ({column.store.name})")
            raise
        run.parts.counters.fetched(table.fetched, column.store.row_nbytes)
        window.passage.fetched(table.fetched * column.store.row_nbytes, column.store)


def carry(run: Run, window: Window) -> None:
    """Copy the rows that older slots hold into this one, on the current stream. Marks do not travel here."""
    for table_number, table in enumerate(window.tables):
        assert table.layout is not None or not table.sources
        carried = iter(_carried(table))
        for source, start, stop in table.sources:
            places = next(carried)
            older = run.windows[source].tables[table_number].carved
            assert older is not None
            assert table.carved is not None
            for column, out in zip(older.columns, table.carved.columns, strict=True):
                pick_rows(run.parts.device, "carry", column, places, out=out[start:stop])
            run.parts.counters.carried(stop - start, run.parts.source.tables[table_number].row_nbytes)


def _carried(table: TableWindow) -> list[Tensor]:
    """The places to carry from, a tensor a source that has any."""
    return [places for places in table.layout.carried if places.numel()] if table.layout else []


def _reads_on_host(run: Run) -> bool:
    return any(mover.wants_host_rows for movers in run.parts.movers for mover in movers)


def _fail(run: Run, error: Exception) -> None:
    with run.host.lock:
        run.failure = error
    run.host.notify()


def _finish(run: Run, number: int) -> None:
    """The sampler has no more batches, or failed after the last one."""
    with run.host.lock:
        run.failure = run.pending_error
        if run.failure is None:
            run.ended = number
    run.host.notify()


def _replan(run: Run, window: Window, error: Exception) -> bool:
    """A fetch failed: plan its batches again one by one, so that those before the failing one arrive. False when it was one."""
    alone = len(window.requests) == 1
    with run.host.lock:
        del run.windows[window.number]
        if run.slots.unplan(window.number):  # rows that the window before kept for this one
            run.queue(DrainJob(run.windows[window.number - 1], None))
        if alone:
            run.failure = error
        else:
            run.backlog.extendleft(reversed(window.requests))
            run.single_until = window.requests[-1].number + 1
    if alone:
        error.add_note(f"while fetching batch {window.requests[0].number}")
    run.host.notify()
    return not alone
