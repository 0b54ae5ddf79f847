"""Judges that a test decides: one way for good, or another one every few windows; and pipelines that go by them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import final

from rowferry.pipeline._candidates import make_mover
from rowferry.pipeline._chosen import Chosen
from rowferry.pipeline._copy import Copy
from rowferry.pipeline._movers import Mover
from rowferry.pipeline._trial import Judge
from rowferry.pipeline.loader import Pipeline
from rowferry.stores._casts_on_host import casts_on_host

PAIRS = {"copy": (1, 1), "zero-copy": (0, 0), "mixed": (0, 1), "mixed-back": (1, 0)}
"""Reading and writing by the kernel (0) or by the copy engine and host threads (1)."""


@final
class Fixed:
    """Always the same way."""

    settled = True

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.why = "a test says so"

    def begun(self, nbytes: int) -> None:
        del nbytes

    def measured(self, way: int, nbytes: int, seconds: float) -> None:
        del way, nbytes, seconds

    def copy(self) -> Judge:
        return Fixed(self.turn)


@final
class Changing:
    """Another way every few windows, as a seed decides, settled or not.

    Attributes:
        turns: the ways that were taken.
        seconds: what was measured.
    """

    def __init__(self, ways: int, seed: int) -> None:
        self._ways = ways
        self._random = random.Random(seed)
        self._left = 0
        self.turns: list[int] = []
        self.seconds: list[float] = []
        self.turn, self.settled = 0, False
        self.why = "a test says so"
        self._draw()

    def begun(self, nbytes: int) -> None:
        del nbytes
        self.turns.append(self.turn)
        self._left -= 1
        if self._left <= 0:
            self._draw()

    def measured(self, way: int, nbytes: int, seconds: float) -> None:
        del way, nbytes
        self.seconds.append(seconds)

    def copy(self) -> Judge:
        return deepcopy(self)

    def _draw(self) -> None:
        self.turn = self._random.randrange(self._ways)
        self.settled = self._random.random() < 0.5
        self._left = self._random.randrange(1, 4)


def set_movers(pipe: Pipeline, name: str, seed: int) -> list[Judge]:
    """Let the rows of ``pipe`` cross by a pair of ``PAIRS``, or by ``"changing"`` ones; who judges them.

    Stores without memory are read and written by the host in any case.
    """
    parts = pipe._parts
    judges: list[Judge] = []
    assert parts is not None

    def judge(names: Sequence[str], what: str) -> Judge:
        judges.append(Changing(len(names), seed + len(judges)) if name == "changing" else Fixed(PAIRS[name][what == "writing"]))
        return judges[-1]

    for table, movers in zip(parts.source.tables, parts.movers, strict=True):
        for number, column in enumerate(table.columns):
            store, device = column.store, parts.device
            copy = make_mover("copy", store, device, 4)
            both: list[Mover] = [copy if store.memory is None else make_mover("zero-copy", store, device, 4), copy]
            writes = len(both) if parts.settings.writable else 0
            if name == "changing" and not writes and casts_on_host(store.dtype, column.dtype):
                both.append(Copy(device, store, 4, cast=column.dtype))
            movers[number] = Chosen(device, both, store.row_nbytes, judge, writes=writes)  # type: ignore[index]  # a list
    return judges
