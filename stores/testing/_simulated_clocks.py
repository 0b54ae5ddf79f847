"""Who happened before whom: vector clocks, and the accesses of a block of memory that they must order. Pure.

An *actor* is a stream or a host thread. A clock says how far each actor had come when something happened; ``a`` is
ordered before ``b`` when ``b``'s clock has reached ``a``'s time on ``a``'s actor. The orders are those that the program
asked for (stream order, events, locks), not the order in which the scheduler happened to run things: a race is found
on every schedule, also on those where nothing goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

Clock = Mapping[str, int]
"""How far each actor had come. Never changed in place, so a reference is a snapshot."""


def joined(*clocks: Clock) -> dict[str, int]:
    """A new clock: after all of ``clocks``."""
    result: dict[str, int] = {}
    for clock in clocks:
        for actor, time in clock.items():
            if time > result.get(actor, 0):
                result[actor] = time
    return result


class RaceError(RuntimeError):
    """Two accesses of the same bytes, one of them a write, that no order separates."""


@final
@dataclass(frozen=True, slots=True)
class Access:
    """One use of bytes ``[start, stop)`` of a block by ``actor`` at its own ``time``."""

    actor: str
    time: int
    what: str
    write: bool
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.what!r} on {self.actor}"

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        return (self.write or other.write) and self.start < other.stop and other.start < self.stop

    def before(self, clock: Clock) -> bool:
        """Whether what happens at ``clock`` is ordered after this access."""
        return clock.get(self.actor, 0) >= self.time

    def covers(self, old: Access) -> bool:
        """Whether ``old``, ordered before this one, need not be remembered: who races with it races with this too."""
        return (self.write or not old.write) and self.start <= old.start and old.stop <= self.stop


@final
class History:
    """The accesses of one block that a later one could still race with."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def check(self, new: Access, clock: Clock, label: str) -> None:
        """Raise RaceError when ``new``, at ``clock``, conflicts with an access that is not ordered before it."""
        for old in reversed(self._accesses):  # the latest says most
            if old.conflicts(new) and not old.before(clock):
                raise RaceError(_race(old, new, label))

    def add(self, new: Access, clock: Clock, label: str) -> None:
        """``check``, then remember ``new``."""
        self.check(new, clock, label)
        self._accesses = [old for old in self._accesses if not (new.covers(old) and old.before(clock))]
        self._accesses.append(new)


def _race(old: Access, new: Access, label: str) -> str:
    did = {True: "writes", False: "reads"}
    return (
        f"race on {label}: {new} {did[new.write]} bytes {new.start} to {new.stop}, and {old} {did[old.write]} bytes "
        f"{old.start} to {old.stop}; nothing orders the first after the second. Missing edge: {_missing_edge(old, new)}"
    )


def _missing_edge(old: Access, new: Access) -> str:
    if old.actor.startswith("stream "):
        ask = "wait for" if new.actor.startswith("stream ") else "synchronize with"
        return f"let {new.actor} {ask} an event recorded on {old.actor} after {old.what!r}"
    return f"let the thread that causes {new} take a lock that {old.actor} released after {old.what!r}"
