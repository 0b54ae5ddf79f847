"""A picture of some steps: spans on the tracks of threads and streams, written as a Chrome trace, which Perfetto opens.

The format is the JSON object of Chrome's trace events: ``traceEvents``, each a complete event (``ph`` X) with its start and
length in microseconds, and metadata (``ph`` M) that names processes and threads.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, final

from rowferry.stores._device_contract import Event
from rowferry.stores._files import beside

from ._passage import CAUSES, Cause, Passage, Span, Timed, split

logger = logging.getLogger("rowferry")

Track = Literal[
    "consumer thread", "producer thread", "writer thread", "consumer stream", "plan stream", "fetch stream", "writer stream"
]
HOST: Final[tuple[Track, ...]] = ("consumer thread", "producer thread", "writer thread")
DEVICE: Final[tuple[Track, ...]] = ("consumer stream", "plan stream", "fetch stream", "writer stream")

# Of Chrome's own palette, for viewers that know it; Perfetto colours by name, and a wait is named by its cause.
_COLOURS: Final[dict[Cause, str]] = {
    "sampler": "rail_animation",
    "plan": "thread_state_uninterruptible",
    "host gather": "thread_state_iowait",
    "link": "terrible",
    "store": "bad",
    "drain": "rail_load",
    "cold start": "grey",
}


@final
class Recorder:
    """Spans of the next ``steps`` batches, on their way to ``path``. Any thread adds.

    A device may be far behind the thread that gives it work. So recording goes on until the consumer's stream has come to
    the window after that of the last step, or the epoch ends.
    """

    def __init__(self, path: str | os.PathLike[str], steps: int, device: str, now: float) -> None:
        self._path = Path(path)
        self._device = device
        self._steps = steps
        self._since = now
        self._until: float | None = None
        self._last_window: int | None = None  # of the last step
        self._last: tuple[Passage, Timed] | None = None  # the newest window
        self._events: list[tuple[Track, str, Span, dict[str, Any]]] = []

    def add(self, track: Track, name: str, span: Span, **told: Any) -> None:
        """Something took ``span``. ``told`` is shown beside it."""
        self._events.append((track, name, span, told))

    def wait(self, track: Track, cause: Cause, span: Span) -> None:
        """A wait, named and coloured by its cause."""
        self.add(track, f"wait: {cause}", span, cause=cause)

    def step(self, number: int, span: Span, *, window: int) -> None:
        """``next()`` gave out batch ``number``, of ``window``."""
        if self._last_window is None:
            self.add("consumer thread", f"batch {number}", span)
            self._steps -= 1
            self._last_window = window if self._steps == 0 else None

    def window(self, passage: Passage, timed: Timed, at: Callable[[Event], float]) -> None:
        """A window's way, which has passed. ``at``: when an event that has passed did so."""
        _, (sampled, _), (planned, _), *_ = timed.steps
        self.add("plan stream", "plan", Span(sampled, planned), window=timed.number)
        self.add("fetch stream", "fetch", timed.fetch, window=timed.number, bytes=timed.nbytes, gbps=timed.rate / 1e9)
        for cause, span in timed.waits():
            self.wait("consumer stream", cause, span)
        if passage.blocked is not None:
            for cause, span in split(passage.blocked, timed.steps):
                self.wait("consumer thread", cause, span)
        self._use(at)
        self._last = passage, timed
        if self._last_window is not None and timed.number > self._last_window:
            self._until = timed.wait.start

    def _use(self, at: Callable[[Event], float]) -> None:
        """The window before: served, and used by the training, from when it was there until it was written."""
        if self._last is not None:
            passage, timed = self._last
            if passage.written is not None and passage.written.query():
                self.add("consumer stream", f"window {timed.number}", Span(timed.wait.stop, at(passage.written)))

    @property
    def is_over(self) -> bool:
        """Whether everything is known that the steps started."""
        return self._until is not None

    def finish(self, at: Callable[[Event], float]) -> None:
        """Write the file. That it can't be written is logged: a training does not end for want of its picture."""
        self._use(at)
        try:
            self._write()
        except OSError:
            logger.exception("the trace %s was not written", self._path)

    def _write(self) -> None:
        """The file takes its place whole."""
        until = self._until if self._until is not None else math.inf
        shown = [event for event in list(self._events) if event[2].stop >= self._since and event[2].start <= until]
        events = [*_names(self._device), *(self._event(*event) for event in shown)]
        with beside(self._path) as half:
            half.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "utf-8")
            os.replace(half, self._path)
        logger.info("wrote a trace of %d spans to %s", len(shown), self._path)

    def _event(self, track: Track, name: str, span: Span, told: dict[str, Any]) -> dict[str, Any]:
        process, thread = _place(track)
        cause = told.get("cause")
        event = {"name": name, "cat": "wait" if cause in CAUSES else "work", "ph": "X", "pid": process, "tid": thread}
        colour = {"cname": _COLOURS[cause]} if cause in CAUSES else {}
        span = Span(max(span.start, self._since), span.stop)
        start, length = (span.start - self._since) * 1e6, span.seconds * 1e6
        return {**event, "ts": round(start, 3), "dur": round(length, 3), **colour, "args": told}


def new_recorder(path: str | os.PathLike[str], steps: int, device: str, now: float) -> Recorder:
    """A checked ``Recorder``.

    Raises:
        TypeError, ValueError: ``steps`` is not a positive integer. FileNotFoundError: there is no such folder.
        IsADirectoryError: ``path`` is one.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an integer, not {steps!r}")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; pass the name of a file, such as {target / 'trace.json'}")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.absolute().parent} to write {target.name} to")
    return Recorder(target, steps, device, now)


def _place(track: Track) -> tuple[int, int]:
    """Process and thread of a track in the file."""
    return (1, HOST.index(track) + 1) if track in HOST else (2, DEVICE.index(track) + 1)


def _names(device: str) -> Iterator[dict[str, Any]]:
    for process, name in ((1, "rowferry on the host"), (2, f"rowferry on {device}")):
        yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    for track in (*HOST, *DEVICE):
        process, thread = _place(track)
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": track}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": thread}}
