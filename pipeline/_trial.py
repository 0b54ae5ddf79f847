"""Which of several ways takes the next window: each is tried on the pipeline's own windows, and the fastest stays. Pure.

Windows begin small and grow, and the rate of a small one says little. So the preferred way takes the windows that still
grow; then the ways take turns; then the best rate of each counts, over windows of like size: what a way pays once (a
first allocation, a cold cache) is not held against it. A rate that falls later, to less than another way's or very far, is
seen, and the ways are tried again.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, final

SETTLE = 20  # windows until a choice has been made, whatever was measured by then
GROW = 11  # windows that may grow before the ways take turns: from one batch to a thousand
ROUNDS = 2  # windows that each way takes: what it pays once, and what it is worth
GROWTH = 1.25  # a window that is so many times as large as the one before still grows
CLEARLY = 1.1  # by so much a way must be faster than one before it in the list: host threads cost the training loop
FALLEN = 2 / 3  # of the rate it was chosen for: a direction that later shares the link with the other keeps half of it
FAR = 1 / 3  # of that rate: so far that what was known of the other ways may not hold either
SEVERAL = 4  # windows in a row that must have fallen; twice as many after each new try
OTHER = 16  # windows in a row of another size
STEADY = 64 << 20  # bytes; windows of as many and more have the same rate
WINDOW_BYTES = 256 << 20  # of a slot; while ways are tried windows are no larger, for one way may be ten times slower


class Judge(Protocol):
    """Says which way is next. One thread."""

    @property
    def turn(self) -> int:
        """The way that takes the next window, a place in the list of ways."""

    @property
    def why(self) -> str:
        """In words."""

    @property
    def settled(self) -> bool:
        """Whether a choice was made."""

    def begun(self, nbytes: int) -> None:
        """A window of ``nbytes`` bytes is on its way: another one may be next."""

    def measured(self, way: int, nbytes: int, seconds: float) -> None:
        """A window went by ``way`` and took so long. Some windows later, in the order of windows."""

    def copy(self) -> Judge:
        """Another one that knows the same and goes on by itself. Any thread, also while this one judges."""


class _Sample(NamedTuple):
    way: int
    nbytes: int
    rate: float  # bytes a second


def _alike(one: int, other: int) -> bool:
    """Whether windows of these sizes can be compared."""
    one, other = min(one, STEADY), min(other, STEADY)
    return one <= 2 * other and other <= 2 * one


@final
class Trial:
    """See the module's text.

    Args:
        ways: their names, in order of preference.
        in_turn: in a round every way takes one window; else each takes all of its windows one after the other. (So a
            trial of ways to read and one of ways to write, side by side, meet all pairs.)
        settled: called with ``why`` whenever a choice was made.
    """

    def __init__(self, ways: Sequence[str], *, in_turn: bool = True, settled: Callable[[str], None]) -> None:
        self._ways = ways
        self._in_turn = in_turn
        self._tell = settled
        self._patience = SEVERAL
        self.turn = 0
        self.why = f"{', '.join(ways)} are tried on the first windows"
        self.settled = False
        self._rate, self._nbytes = 0.0, 0  # of the choice
        self._other = math.inf  # the best rate of the other ways
        self._again = ""
        self._turns: deque[int] | None = None  # left; None while windows still grow
        self._windows = self._last = self._strange = 0
        self._samples: list[_Sample] = []
        self._recent: deque[float] = deque(maxlen=self._patience)

    def begun(self, nbytes: int) -> None:
        self._windows += 1
        if self.settled:
            return
        if self._turns is None:
            grows, self._last = nbytes >= GROWTH * self._last, nbytes
            if grows and self._windows < GROW:
                return
            self._turns = self._all_turns()
        self.turn = self._turns.popleft() if self._turns else 0
        if self._windows >= SETTLE - 1:
            self._settle()

    def measured(self, way: int, nbytes: int, seconds: float) -> None:
        if seconds <= 0 or not nbytes:
            return
        sample = _Sample(way, nbytes, nbytes / seconds)
        if self.settled:
            if way == self.turn:
                self._watch(sample)
            return
        self._samples.append(sample)
        compared = self._comparable()
        if all(sum(each.way == number for each in compared) >= ROUNDS for number in range(len(self._ways))):
            self._settle()

    def copy(self) -> Trial:
        other = copy.copy(self)
        other._samples, other._recent = other._samples.copy(), other._recent.copy()
        other._turns = None if other._turns is None else other._turns.copy()
        return other

    # ---- trying -----------------------------------------------------------------------------------------------

    def _all_turns(self) -> deque[int]:
        numbers = range(len(self._ways))
        if self._in_turn:
            return deque(number for _ in range(ROUNDS) for number in numbers)
        return deque(number for number in numbers for _ in range(ROUNDS))

    def _comparable(self) -> list[_Sample]:
        largest = max(sample.nbytes for sample in self._samples)
        return [sample for sample in self._samples if _alike(sample.nbytes, largest)]

    def _settle(self) -> None:
        self._windows = 0
        self._recent.clear()
        best: dict[int, _Sample] = {}
        for samples in (self._comparable() if self._samples else (), self._samples):  # of any size where none is alike
            known = set(best)
            for sample in samples:
                if sample.way not in known and (sample.way not in best or sample.rate > best[sample.way].rate):
                    best[sample.way] = sample
        if not best:
            self.turn = 0
            self.why = f"{self._again}{self._ways[0]}: it is preferred, and nothing could be measured"
        else:
            fastest = max(sample.rate for sample in best.values())
            self.turn = min(way for way, sample in best.items() if sample.rate * CLEARLY >= fastest)
            self._rate, self._nbytes = best[self.turn].rate, best[self.turn].nbytes
            self._other = max((sample.rate for way, sample in best.items() if way != self.turn), default=math.inf)
            self.why = self._again + self._words(best)
        self.settled = True  # last: who copies it meanwhile gets one that still tries
        self._tell(self.why)

    def _words(self, best: dict[int, _Sample]) -> str:
        others = [f"{best[way].rate / 1e9:.3g} GB/s by {self._ways[way]}" for way in sorted(best) if way != self.turn]
        size = f"in windows of {self._nbytes / 2**20:.3g} MiB"
        if not others:
            return f"{self._ways[self.turn]}: {self._rate / 1e9:.3g} GB/s {size}"
        slower = any(sample.rate > self._rate for sample in best.values())
        note = f"; what is not {CLEARLY - 1:.0%} faster is not worth its host threads" if slower else ""
        return f"{self._ways[self.turn]}: {self._rate / 1e9:.3g} GB/s against {' and '.join(others)}, {size}{note}"

    # ---- watching ---------------------------------------------------------------------------------------------

    def _watch(self, sample: _Sample) -> None:
        """Try again when several windows in a row were far slower than the choice promised, or of another size."""
        if not self._rate:
            return
        if not _alike(sample.nbytes, self._nbytes):
            self._strange += 1
            if self._strange == OTHER:
                self._retry(f"windows of {sample.nbytes / 2**20:.3g} instead of {self._nbytes / 2**20:.3g} MiB", None)
            return
        self._strange = 0
        self._recent.append(sample.rate)
        best = max(self._recent)
        fallen = best < FALLEN * self._rate and (best < self._other or best < FAR * self._rate)
        if len(self._recent) == self._patience and fallen:
            self._patience = min(2 * self._patience, 64)
            self._retry(f"{self._ways[self.turn]} fell from {self._rate / 1e9:.3g} to {best / 1e9:.3g} GB/s", self._all_turns())

    def _retry(self, reason: str, turns: deque[int] | None) -> None:
        self.settled = False
        self._again = f"tried again ({reason}); "
        self._turns = turns
        self._windows = self._last = self._strange = 0
        self._samples.clear()
        self._recent = deque(maxlen=self._patience)
        self.turn = turns.popleft() if turns else 0
        self.why = f"{reason}: {', '.join(self._ways)} are tried again"
