"""One epoch in flight: what the producer, the writer and the consumer share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from rowferry.stores._device_contract import Device, Event

from ._counters import Counters
from ._engine import Host, Predicate
from ._flight import Request, Window
from ._ids import Permute
from ._movers import Mover
from ._requests import Requests
from ._slots import Slots
from ._source import Source
from ._staging import Arenas, PinnedPool
from ._timeline import Timeline
from ._window import Plan


@dataclass(frozen=True)
class Settings:
    """How a pipeline moves rows; the same for all its epochs."""

    depth: int
    lookahead: int
    """Most batches in a window; with ``inline`` 1."""
    inline: bool
    """``lookahead=0``: everything happens inside ``next()``."""
    writable: bool
    fetch: bool


@dataclass(frozen=True)
class Streams:
    """The pipeline's own streams. The consumer's are the user's."""

    plan: Any
    fetch: Any
    writer: Any

    def all(self) -> tuple[Any, Any, Any]:
        """Each of them."""
        return self.plan, self.fetch, self.writer


@dataclass(frozen=True)
class Parts:
    """What outlives an epoch: made by the pipeline at construction, lent to each run."""

    source: Source
    settings: Settings
    device: Device
    streams: Streams
    arenas: Arenas
    pool: PinnedPool
    movers: Sequence[Sequence[Mover]]
    """By table and column."""
    plan: Plan
    permute: Permute | None
    """Evaluates a shuffled order on the device; None where the host must."""
    counters: Counters
    timeline: Timeline
    pid: int
    """The process that owns the threads and the device."""

    def follow_caller(self) -> None:
        """Work on the pipeline's streams runs after what the calling thread's stream had queued."""
        device = self.device
        here = device.record(device.current())
        for stream in self.streams.all():
            device.wait(stream, here)


@dataclass
class DrainJob:
    """Marked rows of one window on their way to the store.

    Attributes:
        lists: marks to drain by (table, column), uint8 ``(d,)``; None for all marks that are left in the slot (rows
            kept for a carry that will not happen), which the writer lists itself.
        after: the event after which the lists are whole; None with ``lists``: after *written*.
    """

    window: Window
    lists: dict[tuple[int, int], Tensor] | None
    after: Event | None = None


@final
@dataclass
class Run:
    """The shared state of one epoch. Everything mutable here changes under ``host.lock`` only.

    Attributes:
        backlog: requests taken and not yet planned (left over by a window that was full, or being replanned).
        windows: those with a plan whose slot has not been taken again, by number.
        wanted: the window that the consumer holds or waits for; -1 before the first ``next()``.
        ended: how many windows there are, known when the sampler is exhausted.
        failure: the producer's error, delivered when ``next()`` reaches its batch.
        jobs: drains in order; the writer works the first one.
        drain_error: what the first job failed with; the next call of the consumer raises it.
        retry: the consumer asked for the failed job to be tried again.
        closing: no more windows; the writer ends when ``jobs`` is empty.
        landings: drains by kernels that windows fetched since then follow in stream order, and the host does not yet; the
            producer's alone.
        last_landing: after the newest drain by a kernel; the writer's stream has one order, so it covers those before.
    """

    parts: Parts
    host: Host
    requests: Requests
    slots: Slots
    backlog: deque[Request] = field(default_factory=deque)
    windows: dict[int, Window] = field(default_factory=dict)
    wanted: int = -1
    ended: int | None = None
    failure: BaseException | None = None
    jobs: deque[DrainJob] = field(default_factory=deque)
    drain_error: BaseException | None = None
    retry: bool = False
    closing: bool = False
    landings: list[Event] = field(default_factory=list)
    last_landing: Event | None = None
    taken_all: bool = False
    single_until: int = 0
    """Batches below this number are planned in windows of one: a window with them has failed."""
    pending_error: Exception | None = None
    """The sampler or an index failed after the batches of ``backlog``."""

    def may_plan(self, number: int) -> Predicate:
        """True when the producer is not too far ahead: depth + 1 windows; with ``inline`` never ahead."""
        ahead = 0 if self.parts.settings.inline else self.parts.settings.depth + 1
        return lambda: number <= self.wanted + ahead or self.closing

    def may_claim(self, number: int) -> Predicate:
        """True when window ``number`` may take its slot over, or nothing will."""
        return lambda: self.closing or self.slots.may_claim(number)

    def escaped(self, error: BaseException) -> None:
        """A task died of a bug: whoever waits gets the error."""
        with self.host.lock:
            self.failure = self.failure or error
            self.drain_error = self.drain_error or error

    def queue(self, job: DrainJob) -> None:
        """Append a drain. Under the lock."""
        self.slots.queue_drain(job.window.number)
        job.window.passage.drained = True
        self.jobs.append(job)
