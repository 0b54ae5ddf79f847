"""Where the time of a pipeline went: what the tasks call while they work, and what is made of it afterwards.

The tasks note host times and record timing events; nothing is read until the later event of a pair has passed, and
nothing ever waits. What was read goes into the counters: seconds that the consumer waited, by cause, and seconds that
transfer ran. See ``_passage`` for what is a wait for what.

Who calls it: ``begin``, ``phase``, ``start_fetch`` the producer; ``draining`` the writer; the rest the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from torch import Tensor

from rowferry.stores._device_contract import Device, Event

from ._clock import Clock
from ._counters import Counters
from ._passage import NEAR_THE_LINK, Cause, Passage, Span, Timed
from ._tally import Tally

KEPT = 64  # newest timed windows, for who wants to look at rates


@final
class Timeline:
    """Times of one pipeline, over its epochs.

    Attributes:
        timed: the newest windows whose times are known, oldest first; ``rate`` of each is its fetch in bytes a second.
        link: bytes a second of the copy engine, where known.
    """

    def __init__(self, device: Device, counters: Counters, link: float | None = None) -> None:
        self.timed: deque[Timed] = deque(maxlen=KEPT)
        self.link = link
        self._device = device
        self._clock = Clock(device)
        self._counters = counters
        self._current = Passage()  # the window that the producer works on
        self.tally = Tally(device)
        self._passages: deque[Passage] = deque()  # met by the consumer, not read yet
        self._drains: deque[tuple[Event, Event, float]] = deque()  # start, end, and when the host was done
        self._moved: deque[tuple[int, int]] = deque()

    # ---- producer and writer --------------------------------------------------------------------------------

    def begin(self, number: int) -> Passage:
        """The producer turns to window ``number``."""
        self._current = Passage(number, begun=self._clock.now())
        return self._current

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The producer does ``name``: sampler, plan, slot or fetch."""
        start = self._clock.now()
        try:
            yield
        finally:
            if name == "sampler":
                self._current.sampled += self._clock.now() - start

    def start_fetch(self, passage: Passage, stream: Any, *, after_drain: bool) -> None:
        """The window's slot is free in the order of ``stream``, the fetch stream."""
        passage.claimed, passage.after_drain = self._clock.now(), after_drain
        passage.started = self._clock.mark(stream)

    @contextmanager
    def draining(self, stream: Any, marks: Tensor, row_nbytes: int, *, by_host: bool) -> Iterator[None]:
        """The rows at ``marks`` go to the store, in the order of ``stream``, the writer's.

        ``by_host``: host threads write them, and tell their number. Else the device counts them, before they land.
        """
        start = self._clock.mark(stream)
        if not by_host:
            with self._device.use(stream):
                self.tally.send_count(stream, marks, lambda rows: self._counters.drained(rows, row_nbytes))
        yield
        self._drains.append((start, self._clock.mark(stream), self._clock.now()))

    def moved(self, rows: int, row_nbytes: int) -> None:
        """The number of rows that host threads wrote."""
        self._moved.append((rows, row_nbytes))

    # ---- consumer -------------------------------------------------------------------------------------------

    @contextmanager
    def blocked(self, cause: Cause | None = None) -> Iterator[None]:
        """The consumer's thread blocks. With a ``cause`` that is a wait in itself, else its stream tells what the wait was."""
        start = self._clock.now()
        try:
            yield
        finally:
            seconds = self._clock.now() - start
            self._counters.blocked_seconds += seconds
            if cause is not None:
                self._counters.waited(cause, seconds)
                self._counters.exposed_seconds += seconds

    def meet(self, stream: Any) -> Event:
        """The consumer comes to its next window: a mark before it waits."""
        return self._clock.mark(stream)

    def leave(self, passage: Passage, met: Event, stream: Any) -> None:
        """The window is there, in the order of ``stream``: a mark after the wait. Reads what has passed by now."""
        passage.met, passage.left = met, self._clock.mark(stream)
        self._passages.append(passage)
        self.settle()

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

    # ---- reading --------------------------------------------------------------------------------------------

    def _read(self, passage: Passage) -> None:
        timed = self._times(passage)
        self.timed.append(timed)
        counters = self._counters
        for cause, span in timed.waits():
            counters.waited(cause, span.seconds)
        counters.fetch_seconds += timed.fetch.seconds
        counters.exposed_seconds += timed.exposed

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
        by, fetch = passage.by, Span(started, ready)
        if self.link and fetch.seconds and passage.nbytes / fetch.seconds > NEAR_THE_LINK * self.link:
            by = "link"
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

    def _read_drain(self, start: Event, end: Event, host_end: float) -> None:
        span = Span(self._clock.at(start), max(self._clock.at(end), host_end))
        self._clock.free(start, end)
        self._counters.drains += 1
        self._counters.drain_seconds += span.seconds


def _passed(event: Event | None) -> bool:
    return event is not None and event.query()
