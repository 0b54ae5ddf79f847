"""The writer: drains changed rows to their stores, one job after the other, each landed before the next starts."""

from __future__ import annotations

from torch import Tensor

from . import _marks
from ._engine import Task
from ._flight import Window
from ._movers import DrainList
from ._run import DrainJob, Run
from ._slots import Point


def write(run: Run) -> Task:
    """Work the queue until the run is closing and nothing is left. A failed job stays first and waits for ``retry``."""
    while True:
        yield lambda: (bool(run.jobs) and (run.drain_error is None or run.retry)) or (run.closing and not run.jobs)
        if not run.jobs:
            return
        job = run.jobs[0]
        with run.host.lock:
            run.drain_error, run.retry = None, False
        try:
            yield from _drain(run, job)
        except Exception as error:
            error.add_note(f"while writing back window {job.window.number}; its rows are kept and the next call tries again")
            with run.host.lock:
                run.drain_error = error
        else:
            with run.host.lock:
                run.jobs.popleft()
                run.slots.drained(job.window.number)
        run.host.notify()


def _drain(run: Run, job: DrainJob) -> Task:
    device, stream = run.parts.device, run.parts.streams.writer
    window = job.window
    if job.lists is None:
        # Rows kept for a carry that will not happen: their slot is written, or is about to be.
        yield lambda: run.slots.point(window.number) is Point.WRITTEN
        job.after = window.written
    assert job.after is not None
    device.wait(stream, job.after)
    if job.lists is None:
        job.lists = _list_what_is_left(run, window)
    for (table_number, column_number), marks in job.lists.items():
        table = window.tables[table_number]
        if table.layout is None or table.carved is None:
            continue
        with device.use(stream):
            for tensor in (marks, *table.layout.tensors()):
                device.keep(tensor, stream)
        mover = run.parts.movers[table_number][column_number]
        older, whole = table.layout.older, window.changed_whole(table_number, column_number)
        runs = table.runs if whole else None
        listed = DrainList(table.carved.columns[column_number], marks, table.layout.rows, older.rows, older.places, runs)
        store = run.parts.source.tables[table_number].columns[column_number].store
        try:
            with run.parts.timeline.draining(stream):
                moved, landed = yield from mover.drain(stream, listed)
        except Exception as error:
            error.add_note(f"while writing rows to {store.name}")
            raise
        if moved is not None:
            run.parts.timeline.moved(moved, store.row_nbytes)
        if landed is not None:
            counted = run.parts.timeline.count_moved(stream, marks, store.row_nbytes) if moved is None else landed
            with run.host.lock:
                window.landed.append(landed)
                run.last_landing = counted  # the later of the two in the stream's order


def _list_what_is_left(run: Run, window: Window) -> dict[tuple[int, int], Tensor]:
    """Make the drain lists of all marks still in the slot, on the writer's stream, and clear the marks."""
    device, stream = run.parts.device, run.parts.streams.writer
    lists = {}
    with device.use(stream):
        for table_number, column_number in sorted(window.marked):
            carved = window.tables[table_number].carved
            assert carved is not None
            lists[table_number, column_number] = _marks.take(device, carved.marks[column_number])
    return lists
