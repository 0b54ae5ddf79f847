"""The words of the slot protocol's model: a case, the rules that a test may break, and the state of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

Row = int
Batch = tuple[Row, ...]
Window = tuple[Batch, ...]
GONE = -1  # the value of a row in a slot that was taken anew


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One small program: windows of batches of rows, and what may happen to it.

    Attributes:
        windows: as the planner cuts them. depth: slots.
        writable: each batch is written back; with ``skips`` it may be, and read-only it never is.
        flushes: at most so many, at any time. failures: of fetches, at most so many, at any time.
        closes: ``close()`` or ``break`` may come at any time, not only after the last batch.
    """

    windows: tuple[Window, ...]
    depth: int
    writable: bool = True
    skips: bool = False
    flushes: int = 0
    failures: int = 0
    closes: bool = False


@final
@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol's rules; False breaks one."""

    claim_after_written: bool = True
    claim_after_landed: bool = True
    claim_after_vacated: bool = True
    serve_after_ready: bool = True
    drain_after_point: bool = True  # written, or the point that a flush records
    drains_in_order: bool = True
    carry_after_written: bool = True  # else when the slot is filled, after the source's ready
    carry_takes_mark: bool = True
    newest_source: bool = True  # else the oldest
    source_before_depth: bool = True  # else w-depth too
    drop_kept_from_drain: bool = True  # else a kept row is drained as well as carried with its mark
    mark_travels_one: bool = True  # else any planned window that names the source has the mark kept for it
    drain_kept_at_close: bool = True
    drain_kept_at_failure: bool = True
    drain_kept_at_flush: bool = True
    flush_drains_current: bool = True
    flush_clears_marks: bool = True
    flush_leaves_window_open: bool = True


class Broken(Exception):
    """The promise does not hold in this run."""


class Drain(NamedTuple):
    """Rows of a window's slot on their way to the store."""

    window: int
    rows: tuple[Row, ...]
    point: int  # how many points of the consumer's stream must have passed
    values: tuple[int, ...] | None = None  # None: not read from the slot yet


class State(NamedTuple):
    """Everything. Counts are of windows, from the first: ``filled == 3`` means windows 0, 1 and 2 are ready."""

    windows: tuple[Window, ...]
    store: tuple[int, ...]
    truth: tuple[int, ...]  # what the plain loop's store would hold now
    slots: tuple[tuple[int, ...], ...]  # each with room for every row
    planned: int = 0
    launched: int = 0
    taken: int = 0
    filled: int = 0
    current: int = -1  # the window that the consumer is in
    served: int = 0  # batches of it
    ended: int = 0  # windows that nothing more will be launched on
    written: int = 0  # ... and nothing more will run on
    copied: int = 0  # windows whose carried rows are in their slot
    may_write: bool = False
    marks: frozenset[Row] = frozenset()  # changed rows of the current window
    kept: frozenset[tuple[int, Row]] = frozenset()  # changed rows of ended windows, kept for a carry
    stream: tuple[tuple[object, ...], ...] = ()
    points: int = 0  # that passed on the stream
    queue: tuple[Drain, ...] = ()
    version: int = 0
    flushes: int = 0
    failures: int = 0
    broken: int | None = None  # a window that cannot be fetched
    phase: str = "running"  # or "flushing", "closing", "closed"


def rows_of(window: Window) -> list[Row]:
    """The distinct rows of ``window``."""
    return sorted({row for batch in window for row in batch})
