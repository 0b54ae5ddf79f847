"""One column's mover where several are possible: measures them, and lets the faster one take the next window.

A window's fetch, and its drain, are timed by two events on the stream that does them; nobody waits for these events.
Reading is judged by the producer, writing by the writer, each by itself: any of the movers may read while any writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from rowferry.stores._device_contract import Device, Event

from ._engine import Host, Task
from ._movers import DrainList, FetchList, Mover
from ._trial import SETTLE, Judge


class Later(Protocol):
    """A mover that is not possible yet."""

    reason: str
    """Why not, in words; empty before it was asked."""

    def join(self) -> Mover | None:
        """The mover when it has become possible. Asked when an epoch begins, in the user's thread."""


MakeJudge = Callable[[Sequence[str], str], Judge]
"""``make(names, "reading" or "writing")``: who judges ways of these names."""


class Learnt(NamedTuple):
    """What is known of the ways of one column: it holds for the next pipeline over the same store, too."""

    names: tuple[str, ...]
    reading: Judge
    writing: Judge | None


@dataclass
class _Timed:
    way: int
    nbytes: int
    begun: Event
    ended: Event


@final
class _Side:
    """One direction: who judges, and what is measured but not known yet. One thread; ``why`` any."""

    def __init__(self, device: Device, judge: Judge) -> None:
        self.judge = judge
        self.windows = 0
        self._device = device
        self._timed: deque[_Timed] = deque()

    @property
    def trying(self) -> bool:
        """Whether windows pass by it, and none has been chosen yet: for so long at most as a choice may take."""
        return 0 < self.windows < 2 * SETTLE and not self.judge.settled

    def begin(self, stream: Any) -> Event:
        """The start of a window's work on ``stream``."""
        return self._device.record(stream, timing=True)

    def end(self, stream: Any, way: int, nbytes: int, begun: Event) -> None:
        """Its end: the window's ``nbytes`` went by ``way``. The judge learns what is known by now, and says who is next."""
        self._learn()
        self.windows += 1
        self._timed.append(_Timed(way, nbytes, begun, self._device.record(stream, timing=True)))
        self.judge.begun(nbytes)

    def _learn(self) -> None:
        while self._timed and self._timed[0].ended.query():
            timed = self._timed.popleft()
            self.judge.measured(timed.way, timed.nbytes, timed.begun.elapsed_time(timed.ended) / 1000)
            self._device.recycle(timed.begun)
            self._device.recycle(timed.ended)


@final
class Chosen:
    """Several movers, one of which takes each window's fetch, and one its drain.

    Args:
        movers: in order of preference.
        make_judge: who judges them; asked anew when a mover joins.
        writes: how many of the movers, from the first on, can drain.
        later: a mover that may join when an epoch begins, and is then preferred to the others.
    """

    def __init__(
        self,
        device: Device,
        movers: Sequence[Mover],
        row_nbytes: int,
        make_judge: MakeJudge,
        *,
        writes: int,
        later: Later | None = None,
    ) -> None:
        self._device = device
        self._movers = list(movers)
        self._row_nbytes = row_nbytes
        self._make_judge = make_judge
        self._writes = writes
        self._later = later
        self._start()

    def _start(self) -> None:
        names = [mover.name for mover in self._movers]
        self._reading = _Side(self._device, self._make_judge(names, "reading"))
        self._writing = _Side(self._device, self._make_judge(names[: self._writes], "writing")) if self._writes > 1 else None

    @property
    def trying(self) -> bool:
        """Whether ways are still tried, so that windows had better be small."""
        return self._reading.trying or (self._writing is not None and self._writing.trying)

    def learnt(self) -> Learnt:
        """What is known by now, and what will be: the judges themselves."""
        names = tuple(mover.name for mover in self._movers)
        return Learnt(names, self._reading.judge, None if self._writing is None else self._writing.judge)

    def go_on_with(self, learnt: Learnt) -> None:
        """Before the first window: what an earlier pipeline has learnt of the same store, where it had the same ways.

        By judges of our own that begin there: both pipelines may be live, and each judge belongs to one thread.
        """
        mine = self.learnt()
        if mine.names == learnt.names and (mine.writing is None) == (learnt.writing is None):
            self._reading.judge = learnt.reading.copy()
            if self._writing is not None and learnt.writing is not None:
                self._writing.judge = learnt.writing.copy()

    @property
    def name(self) -> str:
        reads, writes = (self._movers[_shown(side)].name for side in (self._reading, self._writing))
        return reads if self._writing is None or reads == writes else f"{reads} in, {writes} out"

    @property
    def why(self) -> str:
        if len(self._movers) == 1:
            return self._movers[0].why + (f"; {self._later.reason}" if self._later is not None and self._later.reason else "")
        return self._reading.judge.why + (f"; writing: {self._writing.judge.why}" if self._writing is not None else "")

    @property
    def wants_host_rows(self) -> bool:
        return self._movers[self._reading.judge.turn].wants_host_rows

    def holds(self, *, host_rows: bool) -> torch.dtype:
        return self._movers[self._reader(host_rows)].holds(host_rows=host_rows)

    def fetch(self, stream: Any, out: Tensor, wanted: FetchList) -> Task:
        if len(self._movers) == 1:
            yield from self._movers[0].fetch(stream, out, wanted)
            return
        way = self._reader(wanted.host is not None)
        begun = self._reading.begin(stream)
        if not self._reading.judge.settled and self._movers[way].wants_host_rows:
            yield begun  # else the host works while the slot is still in use, and less than its work would be measured
        yield from self._movers[way].fetch(stream, out, wanted)
        self._reading.end(stream, way, len(out) * self._row_nbytes, begun)

    def drain(self, stream: Any, listed: DrainList) -> Generator[Any, None, tuple[int | None, Event | None]]:
        if self._writing is None:
            return (yield from self._movers[0].drain(stream, listed))
        way = self._writing.judge.turn
        begun = self._writing.begin(stream)
        result = yield from self._movers[way].drain(stream, listed)
        self._writing.end(stream, way, len(listed.column) * self._row_nbytes, begun)  # marked or not: only some movers know
        return result

    def bind(self, host: Host) -> None:
        joining = self._later.join() if self._later is not None else None
        if joining is not None:
            self._later = None
            self._movers.insert(0, joining)
            self._start()
        for mover in self._movers:
            mover.bind(host)
        for mover in self._idle():
            mover.rest()

    def rest(self) -> None:
        for mover in self._movers:
            mover.rest()

    def held(self) -> int:
        return sum(mover.held() for mover in self._movers)

    def _reader(self, host_rows: bool) -> int:
        """The judge's turn; where that one needs rows on the host and they were not brought, one that does not."""
        turn = self._reading.judge.turn
        if host_rows or not self._movers[turn].wants_host_rows:
            return turn
        return next((number for number, mover in enumerate(self._movers) if not mover.wants_host_rows), turn)

    def _idle(self) -> list[Mover]:
        """Movers that are not needed as long as no rate falls."""
        judges = [side.judge for side in (self._reading, self._writing) if side is not None]
        if not all(judge.settled for judge in judges):
            return []
        return [mover for number, mover in enumerate(self._movers) if all(number != judge.turn for judge in judges)]


def _shown(side: _Side | None) -> int:
    """The way that a side goes, as users are told: while ways are tried the preferred one."""
    return side.judge.turn if side is not None and side.judge.settled else 0
