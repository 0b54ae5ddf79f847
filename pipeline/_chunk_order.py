"""The order of ``shuffle="chunks"``: chunks in random order, and the rows of a few of them mixed. Pure.

An epoch takes the chunks of a store in the order of a keyed permutation, ``together`` of them at a time, and gives the
rows of such a group in the order of another. So each chunk is read for as long as its group lasts and never again, where
a plain shuffle reads it anew for every window. The last chunk, if it is smaller, joins a group that the key picks.

Guarantees:
- Every row once an epoch. The same seed and epoch give the same order on every machine.
- Memory and time go with a group, not with the store; any place is sought at the cost of one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from ._shuffle import Permutation

_AHEAD = 4  # groups that are made ahead of use
_REMEMBERED = _AHEAD + 1  # a window ends in one and the next begins there


@final
@dataclass(frozen=True, eq=False)
class Group:
    """The rows of one group: those of its chunks, and in which order they are given.

    Attributes:
        rows: ascending, int64, whole chunks.
        places: ``rows[places[i]]`` is the i-th row that is given; int64.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]


@final
@dataclass(frozen=True)
class ChunkOrder:
    """The order of one epoch.

    Attributes:
        n: rows.
        chunk_rows: of a chunk, at least 1.
        together: chunks in a group, at least 1.
        seed, epoch: what the order is keyed by.
    """

    n: int
    chunk_rows: int
    together: int
    seed: int
    epoch: int

    @property
    def groups(self) -> int:
        """Groups of the epoch; at least one where there are rows."""
        whole = self.n // self.chunk_rows
        return max(-(-whole // self.together), 1)

    def start(self, group: int) -> int:
        """The first place of a group, which may be ``groups`` too."""
        rest = self.n % self.chunk_rows
        return min(group * self.together * self.chunk_rows, self.n - rest) + (rest if group > self._with_rest else 0)

    def group_at(self, place: int) -> int:
        """The group that ``place`` (in ``[0, n)``) is in."""
        size, odd = self.together * self.chunk_rows, self._with_rest
        if place < self.start(odd):
            return place // size
        return odd if place < self.start(odd + 1) else (place - self.n % self.chunk_rows) // size

    def group(self, number: int) -> Group:
        """The rows of a group and their order: new arrays."""
        whole = self.n // self.chunk_rows
        chunks = np.arange(number * self.together, min((number + 1) * self.together, whole))
        chosen = Permutation(whole, self.seed, self.epoch)(chunks)
        ascending = np.argsort(chosen)
        inside = np.arange(self.chunk_rows)
        rows = (chosen[ascending][:, None] * self.chunk_rows + inside).reshape(-1)
        rank = np.empty_like(ascending)
        rank[ascending] = np.arange(ascending.size)
        places = (rank[:, None] * self.chunk_rows + inside).reshape(-1)
        if number == self._with_rest:  # the last rows of all
            rest = np.arange(whole * self.chunk_rows, self.n)
            places = np.concatenate([places, np.arange(rows.size, rows.size + rest.size)])
            rows = np.concatenate([rows, rest])
        # Another key for every group, and none that a whole epoch has.
        mixed = Permutation(rows.size, self.seed, ((self.epoch + 1) << 64) + number)(np.arange(rows.size))
        return Group(rows, places[mixed])

    @cached_property
    def _with_rest(self) -> int:
        """The group that has the rows of the last, smaller chunk."""
        return int(Permutation(self.groups, self.seed, -1 - self.epoch)(np.zeros(1, np.int64))[0])


@final
class Groups:
    """The groups of one epoch, the last few remembered. One thread at a time, though not always the same."""

    def __init__(self, order: ChunkOrder) -> None:
        self.order = order
        self._made: dict[int, Group] = {}

    def __getitem__(self, number: int) -> Group:
        found = self._made.get(number)
        if found is None:
            while len(self._made) >= _REMEMBERED:
                del self._made[next(iter(self._made))]
            found = self._made[number] = self.order.group(number)
        return found


@final
@dataclass(frozen=True)
class Mixed:
    """The rows at places ``start`` to ``stop`` of an epoch's order, not yet evaluated."""

    groups: Groups
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def parts(self) -> Iterator[tuple[int, Group, slice]]:
        """The part in each group, in order: the group's number, the group, and which of its ``places``."""
        order, place = self.groups.order, self.start
        while place < self.stop:
            number = order.group_at(place)
            begin, end = order.start(number), min(order.start(number + 1), self.stop)
            yield number, self.groups[number], slice(place - begin, end - begin)
            place = end

    def after(self, most: int) -> Mixed:
        """The places after these: as many, at most ``most``, of a few groups, and none past the end."""
        order = self.groups.order
        stop = min(self.stop + min(len(self), most), order.n)
        if self.stop < stop:
            last = min(order.group_at(self.stop) + _AHEAD, order.groups)
            stop = min(stop, order.start(last) if last < order.groups else order.n)
        return Mixed(self.groups, self.stop, stop)

    def rows(self) -> NDArray[np.int64]:
        """The row numbers: int64, ``(len(self),)``, a new array at each call."""
        return np.concatenate([np.empty(0, np.int64), *(group.rows[group.places[part]] for _, group, part in self.parts())])


def joined(places: Sequence[object]) -> Mixed | None:
    """Batches that follow each other, as one; None where one of them is of no chunk shuffle."""
    found = [each for each in places if isinstance(each, Mixed)]
    return Mixed(found[0].groups, found[0].start, found[-1].stop) if found and len(found) == len(places) else None
