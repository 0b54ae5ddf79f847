"""The points that a slot passes, and the only class that changes them. No torch, no I/O, no waiting.

A window ``w`` uses slot ``w % depth``. It passes, in this order:

    PLANNED -> FILLING -> READY -> CURRENT -> ENDED -> WRITTEN  (-> landed and vacated, then its slot may be taken)

Who may touch what (all of it under the host's lock):

    | call                         | by           | when                                                        |
    | ---                          | ---          | ---                                                         |
    | plan, unplan                 | producer     | a window's plan is whole; its fetch failed                  |
    | may_claim, claim, fill       | producer     | before, at and after a fetch                                |
    | begin, copied, end, written  | consumer     | at the crossing from one window to the next                 |
    | queue_drain                  | all          | before the drain is handed to the writer                    |
    | drained                      | writer       | the rows are in the store                                   |

Guarantees:
- ``may_claim(w)`` is true only after *written*, *landed* and *vacated* of window ``w - depth``.
- A source is never older than ``w - depth + 1``, so no window waits for itself.
- A mark travels only from ``w - 1`` to ``w``, and only when ``end(w - 1)`` found ``w`` planned with that source.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from typing import final


class Point(IntEnum):
    """How far a window has come."""

    PLANNED = 1
    FILLING = 2
    READY = 3
    CURRENT = 4
    ENDED = 5  # its drain list is decided, and being made
    WRITTEN = 6


@final
@dataclass
class _Window:
    point: Point
    sources: frozenset[int]
    users: set[int] = field(default_factory=set)  # planned windows that name this one and have not copied yet
    drains: int = 0  # handed to the writer, not yet in the store
    kept_for: int | None = None  # the window that will take marked rows along


@final
class Slots:
    """The state of all windows of one epoch. See the module's guarantees."""

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self.depth = depth
        self._windows: dict[int, _Window] = {}

    def __repr__(self) -> str:
        parts = (f"{number}:{window.point.name.lower()}" for number, window in sorted(self._windows.items()))
        return f"<Slots depth {self.depth}: {' '.join(parts) or 'all free'}>"

    def candidates(self, number: int) -> range:
        """Windows that window ``number`` may name as sources, oldest first: the ``depth - 1`` before it."""
        return range(max(0, number - self.depth + 1), number)

    def plan(self, number: int, sources: Collection[int]) -> None:
        """Window ``number`` has a plan that copies rows from ``sources``."""
        allowed = self.candidates(number)
        if bad := [source for source in sources if source not in allowed]:
            raise ValueError(f"window {number} names window {bad[0]} as a source; allowed are {list(allowed)}")
        self._windows[number] = _Window(Point.PLANNED, frozenset(sources))
        for source in sources:
            self._windows[source].users.add(number)

    def unplan(self, number: int) -> bool:
        """The plan of ``number`` is void, before it was current. True when rows were kept for it, which must now be drained."""
        window = self._windows.pop(number)
        for source in window.sources:
            self._windows[source].users.discard(number)
        before = self._windows.get(number - 1)
        kept = before is not None and before.kept_for == number
        if before is not None and kept:
            before.kept_for = None
        return kept

    def planned(self, number: int) -> bool:
        """Whether the window has a plan, or had one."""
        return number in self._windows

    def point(self, number: int) -> Point:
        """How far the window has come."""
        return self._windows[number].point

    def may_claim(self, number: int) -> bool:
        """Whether window ``number`` may take its slot: the window before it there is written, landed and vacated."""
        before = self._windows.get(number - self.depth)
        return before is None or (before.point is Point.WRITTEN and self.landed(number - self.depth) and not before.users)

    def claim(self, number: int) -> None:
        """The slot belongs to ``number``; the window before it there is forgotten."""
        self._move(number, Point.PLANNED, Point.FILLING)
        self._windows.pop(number - self.depth, None)

    def fill(self, number: int) -> None:
        """Everything that comes from the store is on its way in stream order."""
        self._move(number, Point.FILLING, Point.READY)

    def begin(self, number: int) -> None:
        """The consumer turns to the window."""
        self._move(number, Point.READY, Point.CURRENT)

    def copied(self, number: int) -> None:
        """Window ``number`` has copied the rows it carries; its sources are vacated as far as it is concerned."""
        for source in self._windows[number].sources:
            self._windows[source].users.discard(number)
            if self._windows[source].kept_for == number:
                self._windows[source].kept_for = None

    def end(self, number: int, *, keep: bool) -> bool:
        """Nothing more is served from ``number``; its drain list is decided now. True when rows stay for the next one's carry.

        Args:
            keep: the window may have marked rows (a writable pipeline).
        """
        self._move(number, Point.CURRENT, Point.ENDED)
        window = self._windows[number]
        if keep and number + 1 in window.users:
            window.kept_for = number + 1
        return window.kept_for is not None

    def written(self, number: int) -> None:
        """The event after its last use, drain list included, is recorded."""
        self._move(number, Point.ENDED, Point.WRITTEN)

    def queue_drain(self, number: int) -> None:
        """Rows of ``number`` were handed to the writer."""
        self._windows[number].drains += 1

    def drained(self, number: int) -> None:
        """They are in the store."""
        self._windows[number].drains -= 1

    def landed(self, number: int) -> bool:
        """Written, nothing on its way to the store, nothing kept."""
        window = self._windows[number]
        return window.point is Point.WRITTEN and window.drains == 0 and window.kept_for is None

    def kept(self) -> list[int]:
        """Windows that hold marked rows for a carry that has not happened."""
        return [number for number, window in self._windows.items() if window.kept_for is not None]

    def release_kept(self, number: int) -> None:
        """The rows that ``number`` kept are drained instead."""
        self._windows[number].kept_for = None

    def _move(self, number: int, old: Point, new: Point) -> None:
        window = self._windows[number]
        if window.point is not old:
            raise RuntimeError(f"window {number} is {window.point.name}, not {old.name}: cannot become {new.name}; {self!r}")
        window.point = new
