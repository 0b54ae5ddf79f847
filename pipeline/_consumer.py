"""The consumer's side: cross from window to window, in the user's thread.

Everything is launched on the stream that is current in the caller. A consumer that changes streams is ordered by the
slot's last use: see ``_enter``.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from . import _marks
from ._flight import Window
from ._producer import carry
from ._run import DrainJob, Run
from ._serving import Taken, check_values, serve, write


@final
class Consumer:
    """Turns the windows of one run into batches. Holds the current window and the place in it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._device = run.parts.device
        self._window: Window | None = None
        self._at = 0
        self._stream: Any = None  # where the slots were last used

    def next(self) -> Taken:
        """The next batch's tensors, ready on the current stream.

        Raises:
            StopIteration: the epoch is over. What the producer, the sampler or a drain failed with.
        """
        self.raise_drain_error()
        self._enter()
        if self._window is not None and self._at == len(self._window.requests):
            self.end_window()
        if self._window is None:
            self._begin()
        window = self._window
        assert window is not None
        batch, self._at = self._at, self._at + 1
        taken = serve(run=self._run, stream=self._stream, window=window, batch=batch)
        if self._at == len(window.requests) and not self._run.parts.settings.writable:
            self.end_window()
        return taken

    def write(self, window: Window, batch: int, values: dict[tuple[int, int], Tensor]) -> None:
        """Put a batch's rows back into its slot, on the current stream. See ``_serving.write``."""
        tables = self._run.parts.source.tables
        for (table, column), rows in values.items():
            start, stop = window.tables[table].pair_span(batch)
            check_values(rows, tables[table].columns[column], stop - start, self._device)
        self._enter()
        write(self._run, self._stream, window, batch, values)

    def end_window(self) -> None:
        """Nothing more is served from the current window: list its changed rows for the writer, record *written*."""
        window, run = self._window, self._run
        if window is None:
            return
        self._window, window.group = None, None
        self._enter()
        with run.host.lock:
            run.slots.end(window.number, keep=bool(window.marked))
            following = run.windows.get(window.number + 1) if run.slots.kept() else None
        lists = self._list(window, following)
        if run.parts.counters.overflow is not None:
            run.parts.counters.overflow.send(self._stream)
        written = window.passage.written = self._device.record(self._stream, timing=True)
        with run.host.lock:
            window.written = written
            run.slots.written(window.number)
            if lists:
                run.queue(DrainJob(window, lists, written))
        run.host.notify()

    def flush(self) -> None:
        """Every row written so far is in its store when this returns. Does not end the window.

        Raises:
            What a drain failed with; the rows are kept, and the next call tries again.
        """
        run, window = self._run, self._window
        if window is not None and window.marked:
            self._enter()
            lists = self._list(window, None)
            after = self._device.record(self._stream)
            with run.host.lock:
                run.queue(DrainJob(window, lists, after))
        self.drain_kept()
        self.wait_drained()

    def drain_kept(self) -> None:
        """Rows kept for a carry that has not happened go to the store instead."""
        run = self._run
        with run.host.lock:
            for number in run.slots.kept():
                run.slots.release_kept(number)
                run.queue(DrainJob(run.windows[number], None))
        run.host.notify()

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Block until the writer's queue has landed; False when ``timeout`` seconds passed first."""
        run = self._run
        with run.host.lock:
            run.retry = run.drain_error is not None
        run.host.notify()
        with run.parts.timeline.blocked("drain"):
            if not run.host.wait(lambda: not run.jobs or (run.drain_error is not None and not run.retry), timeout):
                return False
            if run.jobs:
                assert run.drain_error is not None
                raise run.drain_error
            if run.last_landing is not None:
                run.host.synchronize(run.last_landing)
        return True

    def raise_drain_error(self) -> None:
        """A failed drain rises here, and is tried again."""
        run = self._run
        if run.drain_error is None:
            return
        with run.host.lock:
            error = run.drain_error if not run.retry else None
            run.retry = run.drain_error is not None
        if error is not None:
            run.host.notify()
            raise error

    # ---- crossing ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Wait for the next window, order the current stream after it, and carry changed rows into it."""
        run, device = self._run, self._device
        number = run.wanted + 1
        with run.host.lock:
            run.wanted = number
        run.host.notify()
        met = run.parts.timeline.meet(self._stream)
        with run.parts.timeline.blocked():
            run.host.wait(lambda: self._arrived(number) or (run.drain_error is not None and not run.retry))
        if not self._arrived(number):
            self._give_up_waiting_for(number)
            self.raise_drain_error()
        if number not in run.windows or run.windows[number].ready is None:
            self._give_up_waiting_for(number)
            if run.failure is not None:
                raise run.failure
            raise StopIteration
        window = run.windows[number]
        assert window.ready is not None
        device.wait(self._stream, window.ready)
        run.parts.timeline.leave(window.passage, met, self._stream)
        self._window, self._at = window, 0
        if run.parts.settings.writable:
            carry(run, window)
            self._carry_marks(window)
            copied = device.record(self._stream) if window.source_windows else None
            with run.host.lock:
                for source in window.source_windows:
                    run.windows[source].vacated.append(copied)  # type: ignore[arg-type]  # not None: there are sources
                run.slots.begin(number)
                run.slots.copied(number)
        else:
            with run.host.lock:
                run.slots.begin(number)
        distinct = [table.distinct for table in window.tables]
        sizes = [table.row_nbytes for table in run.parts.source.tables]
        run.parts.counters.began(len(window.requests), sum(distinct), sum(map(int.__mul__, distinct, sizes)))
        run.host.notify()

    def _give_up_waiting_for(self, number: int) -> None:
        with self._run.host.lock:
            self._run.wanted = number - 1

    def _arrived(self, number: int) -> bool:
        run = self._run
        window = run.windows.get(number)
        return (window is not None and window.ready is not None) or run.failure is not None or run.ended == number

    def _carry_marks(self, window: Window) -> None:
        """Marks that the window before kept for this one travel with their rows."""
        run, device = self._run, self._device
        if window.number - 1 not in run.slots.kept():
            return
        before = run.windows[window.number - 1]
        for table_number, table in enumerate(window.tables):
            for source, start, stop in table.sources:
                if source != before.number:
                    continue
                assert table.layout is not None
                places = table.layout.carried[0]  # the newest source is the first
                old, new = before.tables[table_number].carved, table.carved
                assert old is not None
                assert new is not None
                for column in range(len(new.marks)):
                    if (table_number, column) not in before.marked:
                        continue
                    _marks.carry(device, old.marks[column], places, new.marks[column][start:stop])
                    window.marked.add((table_number, column))

    def _list(self, window: Window, following: Window | None) -> dict[tuple[int, int], Tensor]:
        """Drain lists of all marks but those of rows that ``following`` carries; listed marks are cleared."""
        device = self._device
        lists: dict[tuple[int, int], Tensor] = {}
        if following is not None:
            device.wait(self._stream, following.planned)
        for table_number, column in sorted(window.marked):
            carved = window.tables[table_number].carved
            assert carved is not None
            spared = self._spared(window, following, table_number)
            lists[table_number, column] = _marks.take(device, carved.marks[column], spared)
            if spared is not None:
                device.keep(spared, self._stream)
        if following is None:
            window.marked.clear()
        return lists

    def _spared(self, window: Window, following: Window | None, table_number: int) -> Tensor | None:
        """Places of the rows that ``following`` carries from ``window``."""
        if following is None:
            return None
        table = following.tables[table_number]
        if not any(source == window.number for source, _, _ in table.sources):
            return None
        assert table.layout is not None
        return table.layout.carried[0]

    # ---- order ------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Make the current stream the one that slots are used on, ordered after the last one."""
        device = self._device
        current = device.current()
        if self._stream is not None and current != self._stream:
            device.wait(current, device.record(self._stream))
        self._stream = current

    def rows_waiting(self) -> int:
        """Changed rows that have not reached their store, counted a column."""
        waiting = 0
        for job in self._run.jobs:
            lists = job.lists.values() if job.lists is not None else self._marks_left(job.window)
            waiting += sum(_marks.count(self._device, marks) for marks in lists)
        return waiting

    @staticmethod
    def _marks_left(window: Window) -> list[Tensor]:
        """Marks of rows that the window kept for a carry, by column."""
        carved = {number: table.carved for number, table in enumerate(window.tables)}
        return [found.marks[column] for table, column in sorted(window.marked) if (found := carved[table]) is not None]

    def settle(self) -> None:
        """Block until the work on our own streams, and what was launched on the consumer's, has passed."""
        for stream in (*self._run.parts.streams.all(), *((self._stream,) if self._stream is not None else ())):
            self._device.record(stream).synchronize()
