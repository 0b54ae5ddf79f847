"""Time: how long something took, and how much of it is left. A measurement gets a slice and ends with it.

Guarantees:
- No run of ``paced`` begins after its slice has ended, and each is told when that is. What one run does is decided from
  the run before, at most eight times as much, so that none is much longer than it was meant to be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, final

from rowferry.stores._device_contract import Device

clock = time.perf_counter
NEVER = float("inf")

RUNS = 5
_GROWTH = 8  # a run does at most so many times what the one before did
_MOST_BATCHES = 100_000


class Timing(NamedTuple):
    """So many batches took so many seconds."""

    batches: int
    seconds: float


class Figures(NamedTuple):
    """Seconds a batch: the median of ``runs`` runs, and the fastest and slowest."""

    median: float
    fastest: float
    slowest: float
    runs: int


class Slice(NamedTuple):
    """``seconds`` of time, which end at ``stop`` of ``clock``."""

    seconds: float
    stop: float


Run = Callable[[int, float], Timing]
"""``run(count, stop)`` does ``count`` batches; fewer, but at least one, when ``clock`` passes ``stop``."""


@final
class Budget:
    """``seconds`` from now, given out in slices in proportion to weights."""

    def __init__(self, seconds: float) -> None:
        self._stop = clock() + seconds

    def left(self) -> float:
        """Seconds; none is 0."""
        return max(self._stop - clock(), 0.0)

    def slice(self, weight: float, all_weights: float) -> Slice:
        """The part of what is left that ``weight`` has among ``all_weights``, its own among them."""
        seconds = self.left() * weight / all_weights
        return Slice(seconds, clock() + seconds)


def idle(device: Device) -> None:
    """Wait until what the current stream was given has run."""
    device.record(device.current()).synchronize()


def timed(fn: Callable[[], Any], device: Device, runs: int) -> list[float]:
    """Seconds of each of ``runs`` calls, the current stream idle before and after."""
    seconds = []
    for _ in range(runs):
        idle(device)
        start = clock()
        fn()
        idle(device)
        seconds.append(clock() - start)
    return seconds


def paced(run: Run, part: Slice) -> Figures:
    """As many runs as fit, ``RUNS`` at most and one at least, each as long as a share of the slice.

    Shorter ones that find out how many batches that is are not counted, unless there is time for no other.
    """
    each = part.seconds / (RUNS + 2)  # two shares for finding out
    count, found = 1, list[float]()
    while not found or (len(found) < RUNS and clock() + each <= part.stop):
        batches, seconds = run(count, part.stop)
        if seconds >= each / 2 or count >= _MOST_BATCHES or clock() >= part.stop:
            found.append(seconds / batches)
        wanted = count * each / max(seconds, 1e-9)
        count = round(min(max(wanted, 1), _GROWTH * count, _MOST_BATCHES))
    return figures(found)


def fixed(run: Run, count: int, runs: int) -> Figures:
    """``runs`` runs of ``count`` batches."""
    return figures([timing.seconds / timing.batches for timing in (run(count, NEVER) for _ in range(runs))])


def figures(seconds: list[float]) -> Figures:
    """Of the seconds a batch of some runs, at least one."""
    return Figures(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
