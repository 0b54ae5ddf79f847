"""A window's way from the sampler to the consumer: what was noted on it, and what a wait for it was a wait for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from rowferry.stores import Store
from rowferry.stores._device_contract import Event

Cause = Literal["sampler", "plan", "host gather", "link", "store", "drain", "cold start"]
CAUSES: Final[tuple[Cause, ...]] = ("sampler", "plan", "host gather", "link", "store", "drain", "cold start")

NEAR_THE_LINK = 0.8  # of the copy engine's rate; host threads that bring so much do not limit, the link does


class Span(NamedTuple):
    """From ``start`` to ``stop``, seconds of the host's clock."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Its length, never negative."""
        return max(self.stop - self.start, 0.0)

    def overlap(self, other: Span) -> float:
        """Seconds that both have."""
        return max(min(self.stop, other.stop) - max(self.start, other.start), 0.0)


@dataclass
class Passage:
    """Notes on one window. Producer and consumer fill it in; it is read when ``left`` has passed.

    Attributes:
        number: the window.
        begun: when the producer turned to it; ``sampled``: seconds of that inside the sampler.
        claimed: when its slot was free as far as the host could tell.
        after_drain: its slot held changed rows, which had to reach the store first.
        started: after that, on the fetch stream. ``ready``: the end of the fetch.
        gathered: when the host had done its part of the fetch; ``host_rows``: it may have been asked to gather.
        by_host: what a wait for that is called; ``nbytes``: what was read from stores.
        met, left: the consumer's stream, when it came to the window and when it could go on.
        written: nothing more is served from it (consumer's stream).
        drained: rows of it were handed to the writer.
        blocked: the consumer's thread, until the window was under way.
    """

    number: int = 0
    begun: float = 0.0
    sampled: float = 0.0
    claimed: float = 0.0
    after_drain: bool = False
    gathered: float = 0.0
    host_rows: bool = False
    by_host: Cause = "host gather"
    nbytes: int = 0
    planned: Event | None = None
    started: Event | None = None
    ready: Event | None = None
    met: Event | None = None
    left: Event | None = None
    written: Event | None = None
    drained: bool = False
    blocked: Span | None = None

    def fetched(self, nbytes: int, store: Store) -> None:
        """Rows of one column were read. A file or chunks keep host threads busy longer than memory does."""
        self.nbytes += nbytes
        if store.memory is None:
            self.by_host = "store"


@dataclass(frozen=True)
class Timed:
    """A passage on the host's clock.

    Attributes:
        number: the window; 0 is an epoch's first.
        nbytes: read from stores.
        steps: what held the window up, each until when, in order; the last is the fetch. What was before the first is
            the producer's work on older windows.
        fetch: from when its slot was free to when it was filled.
        wait: the consumer, from when it came to the window to when it could go on.
    """

    number: int
    nbytes: int
    steps: tuple[tuple[float, Cause], ...]
    fetch: Span
    wait: Span

    @property
    def rate(self) -> float:
        """Bytes a second of its fetch; 0 when nothing was read or it took no time."""
        return self.nbytes / self.fetch.seconds if self.fetch.seconds else 0.0

    @property
    def waited(self) -> bool:
        """Whether the consumer came before the window was ready."""
        return self.wait.start < self.fetch.stop

    def waits(self) -> list[tuple[Cause, Span]]:
        """The wait by cause, in order of time. The first window of an epoch is one wait, its cold start."""
        if not self.waited:
            return []
        if not self.number:
            return [("cold start", self.wait)]
        return list(split(self.wait, self.steps))

    @property
    def exposed(self) -> float:
        """Seconds of a wait in which the fetch ran, or in which it waited for a drain: transfer that nothing hid."""
        drains = (span.seconds for cause, span in split(self.wait, self.steps) if cause == "drain")
        return self.wait.overlap(self.fetch) + sum(drains)


def split(wait: Span, steps: Iterable[tuple[float, Cause]]) -> Iterable[tuple[Cause, Span]]:
    """The parts of ``wait`` by what was going on. What is left after the last step (a host that woke late) is the last's."""
    at, found = wait.start, list[tuple[Cause, Span]]()
    for until, cause in steps:
        stop = min(until, wait.stop)
        if stop > at:
            found.append((cause, Span(at, stop)))
            at = stop
    if found and at < wait.stop:
        cause, span = found[-1]
        found[-1] = (cause, Span(span.start, wait.stop))
    return found
