"""Where the time of a pipeline went: what the tasks call while they work, and what is made of it afterwards.

The tasks note host times and record timing events; nothing is read until the later event of a pair has passed, and
nothing ever waits. What was read goes into the counters: seconds that the consumer waited, by cause, and seconds that
transfer ran. See ``_passage`` for what is a wait for what.

Who calls it: ``begin``, ``phase``, ``start_fetch`` the producer; ``draining`` the writer; the rest the consumer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

from torch import Tensor

from rowferry.stores._device_contract import Device, Event

from ._clock import Clock
from ._counters import Counters
from ._passage import NEAR_THE_LINK, Cause, Passage, Span, Timed
from ._ranges import Ranges
from ._tally import Tally
from ._trace import Recorder, new_recorder

_NOTHING: AbstractContextManager[Any] = nullcontext()

KEPT = 64  # newest timed windows, for who wants to look at rates


@final
class Timeline:
    """Times of one pipeline, over its epochs.

    Attributes:
        timed: the newest windows whose times are known, oldest first; ``rate`` of each is its fetch in bytes a second.
        link: bytes a second of the copy engine, where known.
    """

    def __init__(self, device: Device, counters: Counters, link: float | None = None, ranges: Ranges | None = None) -> None:
        self.timed: deque[Timed] = deque(maxlen=KEPT)
        self.link = link
        self._device = device
        self._clock = Clock(device)
        self._counters = counters
        self._ranges = ranges
        self._recorder: Recorder | None = None
        self._blocked: Span | None = None
        self._window = 0  # that the consumer is in
        self._current = Passage()  # the window that the producer works on
        self.tally = Tally(device)
        self._passages: deque[Passage] = deque()  # met by the consumer, not read yet
        self._drains: deque[tuple[Event, Event, Span]] = deque()  # on the writer's stream; in its thread
        self._moved: deque[tuple[int, int]] = deque()

    # ---- producer and writer --------------------------------------------------------------------------------

    def begin(self, number: int) -> Passage:
        """The producer turns to window ``number``."""
        self._current = Passage(number, begun=self._clock.now())
        return self._current

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The producer does ``name``: sampler, plan, slot or fetch."""
        told = name == "sampler" or self._recorder is not None or self._ranges is not None
        return self._phase(name) if told else _NOTHING

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = self._clock.now()
        try:
            with self.range(name):
                yield
        finally:
            span = Span(start, self._clock.now())
            if name == "sampler":
                self._current.sampled += span.seconds
            if self._recorder is not None:
                self._recorder.add("producer thread", name, span, window=self._current.number)

    def start_fetch(self, passage: Passage, stream: Any, *, after_drain: bool) -> None:
        """The window's slot is free in the order of ``stream``, the fetch stream."""
        passage.claimed, passage.after_drain = self._clock.now(), after_drain
        passage.started = self._clock.mark(stream)

    def end_fetch(self, passage: Passage, ready: Event, *, host_rows: bool) -> None:
        """All of the fetch is in the order of its stream. ``host_rows``: host threads knew the rows, and may have gathered."""
        passage.ready, passage.gathered, passage.host_rows = ready, self._clock.now(), host_rows

    @contextmanager
    def draining(self, stream: Any) -> Iterator[None]:
        """Changed rows go to a store, in the order of ``stream``, the writer's."""
        start, since = self._clock.mark(stream), self._clock.now()
        with self.range("drain"):
            yield
        span = Span(since, self._clock.now())
        self._drains.append((start, self._clock.mark(stream), span))
        if self._recorder is not None:
            self._recorder.add("writer thread", "drain", span)

    def moved(self, rows: int, row_nbytes: int) -> None:
        """So many rows went to a store."""
        self._moved.append((rows, row_nbytes))

    def count_moved(self, stream: Any, marks: Tensor, row_nbytes: int) -> Event:
        """Rows at ``marks`` went to a store, how many only the device knows. The event after which the number is here."""
        with self._device.use(stream):
            return self.tally.send_count(stream, marks, lambda rows: self._counters.drained(rows, row_nbytes))

    # ---- anybody --------------------------------------------------------------------------------------------

    def range(self, name: str) -> AbstractContextManager[Any]:
        """An NVTX range, where they are asked for."""
        return self._ranges(name) if self._ranges is not None else _NOTHING

    # ---- consumer -------------------------------------------------------------------------------------------

    @contextmanager
    def blocked(self, cause: Cause | None = None) -> Iterator[None]:
        """The consumer's thread blocks. With a ``cause`` that is a wait in itself, else its stream tells what the wait was."""
        start = self._clock.now()
        try:
            yield
        finally:
            span = self._blocked = Span(start, self._clock.now())
            self._counters.blocked_seconds += span.seconds
            if cause is not None:
                self._counters.waited(cause, span.seconds)
                self._counters.exposed_seconds += span.seconds
                if self._recorder is not None:
                    self._recorder.wait("consumer thread", cause, span)

    def meet(self, stream: Any) -> Event:
        """The consumer comes to its next window: a mark before it waits."""
        return self._clock.mark(stream)

    def leave(self, passage: Passage, met: Event, stream: Any) -> None:
        """The window is there, in the order of ``stream``: a mark after the wait. Reads what has passed by now."""
        passage.met, passage.left, passage.blocked = met, self._clock.mark(stream), self._blocked
        self._passages.append(passage)
        self._window = passage.number
        self.settle()

    def step(self) -> AbstractContextManager[None]:
        """A ``next()`` that gives out a batch."""
        return _NOTHING if self._recorder is None and self._ranges is None else self._step()

    @contextmanager
    def _step(self) -> Iterator[None]:
        start = self._clock.now()
        with self.range("next"):
            yield
        if self._recorder is not None:
            self._recorder.step(self._counters.batches - 1, Span(start, self._clock.now()), window=self._window)

    def record(self, path: str | os.PathLike[str], steps: int) -> None:
        """Draw the next ``steps`` batches; see ``_trace``.

        Raises:
            RuntimeError: it is drawing already. As ``new_recorder``.
        """
        if self._recorder is not None:
            raise RuntimeError("a trace is being recorded already; it is written when its steps, or the epoch, are over")
        self._recorder = new_recorder(path, steps, str(self._device.torch), self._clock.now())

    def _end_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.finish(self._clock.at)

    def settle(self) -> None:
        """Read the times and numbers of all that has passed."""
        if self._device.capturing():
            return
        self.tally.read()
        while self._moved:
            self._counters.drained(*self._moved.popleft())
        if (self._passages or self._drains) and self._clock.ready():
            while self._passages and _passed(self._passages[0].left):
                self._read(self._passages.popleft())
            while self._drains and self._drains[0][1].query():
                self._read_drain(*self._drains.popleft())

    def epoch_begins(self, lock: AbstractContextManager[Any]) -> None:
        """``lock`` is the epoch's host's."""
        self.tally.lock = lock

    def epoch_ends(self) -> None:
        """Everything has passed, or will not be asked for."""
        self.settle()
        self._passages.clear()
        self._drains.clear()
        self._end_recording()

    # ---- reading --------------------------------------------------------------------------------------------

    def _read(self, passage: Passage) -> None:
        timed = self._times(passage)
        self.timed.append(timed)
        counters = self._counters
        counters.fetch_seconds += timed.fetch.seconds
        if timed.waited:
            for cause, span in timed.waits():
                counters.waited(cause, span.seconds)
            counters.exposed_seconds += timed.exposed
        if self._recorder is not None:
            self._recorder.window(passage, timed, self._clock.at)
            if self._recorder.is_over:
                self._end_recording()

    def _times(self, passage: Passage) -> Timed:
        clock = self._clock
        assert passage.planned is not None
        assert passage.started is not None
        assert passage.ready is not None
        assert passage.met is not None
        assert passage.left is not None
        clock.not_before(passage.started, passage.claimed)
        sampled = passage.begun + passage.sampled
        planned = max(sampled, clock.at(passage.planned))
        started = max(planned, clock.at(passage.started))
        ready = max(started, clock.at(passage.ready))
        fetch = Span(started, ready)
        by = self._limit(passage, fetch)
        steps: tuple[tuple[float, Cause], ...] = (
            (passage.begun, by),
            (sampled, "sampler"),
            (planned, "plan"),
            (started, "drain" if passage.after_drain else "plan"),
            (ready, by),
        )
        wait = Span(clock.at(passage.met), clock.at(passage.left))
        clock.free(passage.started, passage.met, passage.left)
        passage.started = passage.met = passage.left = None
        return Timed(passage.number, passage.nbytes, steps, fetch, wait)

    def _limit(self, passage: Passage, fetch: Span) -> Cause:
        """Who took the time of a fetch: the host, when it was busy for most of it and the link was not."""
        gathering = fetch.overlap(Span(passage.claimed, passage.gathered))
        if not passage.host_rows or gathering < fetch.seconds / 2:
            return "link"
        if self.link and fetch.seconds and passage.nbytes / fetch.seconds > NEAR_THE_LINK * self.link:
            return "link"
        return passage.by_host

    def _read_drain(self, start: Event, end: Event, host: Span) -> None:
        span = Span(self._clock.at(start), max(self._clock.at(end), host.stop))
        self._clock.free(start, end)
        self._counters.drain_seconds += span.seconds
        if self._recorder is not None:
            self._recorder.add("writer stream", "drain", span)


def _passed(event: Event | None) -> bool:
    return event is not None and event.query()
