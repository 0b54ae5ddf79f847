"""A device on which launched work really runs late, in any order that streams and events allow.

Guarantees:
- Nothing runs at ``launch``. Work runs in ``step`` and ``drain``, and where a host waits for an event; which runnable
  work is next, the seed decides. So every order that a real device could show comes up over the seeds.
- Two uses of the same bytes, one of them a write, that nothing orders are a RaceError at the second one's launch (or
  host access), on every seed. It is also kept in ``races``, so code that swallows errors hides none. The bytes of a
  tensor with gaps are all from its first to its last.
- Memory of ``empty`` and ``pinned`` is poisoned (bytes 0xA5) before it is lent. A block whose last reference died
  belongs at once to the pool of the stream it was allocated on, and is poisoned there in stream order, unless ``keep``
  named other streams: then it returns when their work up to the death has passed. Queued work keeps no memory alive.
- Time is simulated too, and the same on every seed: work takes what ``cost`` says, from when its stream, the events that
  it waits for and the host that launched it are there. A host spends time in ``spend`` and where it waits for events.
- A launched function finds poison in memory of the device that its launch did not list; an in-place change of memory
  that is not under ``writes`` is a ContractError.

Assumes:
- Host code says what it touches of pinned memory (``host_reads``, ``host_writes``), and orders its threads by locks of
  ``lock()``. A thread of ours calls ``enter_thread`` first. Tasks of one thread may play several hosts (``host``).
- Memory that the device did not hand out is not checked for races (rows of a store are ordered row by row, which no
  list can say): wrong values tell.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch import dtype as Dtype  # inside the class, `torch` is the device

from rowferry.stores._devices import PASSED

from ._simulated_allocator import Allocator, ContractError
from ._simulated_clocks import RaceError, joined
from ._simulated_knobs import Cost, Drop, a_millisecond, drop_nothing
from ._simulated_launch import taken
from ._simulated_queue import HostLock, Hosts, Mark, SimulatedEvent, SimulatedStream, Wait, Work


@final
class SimulatedDevice:
    """``Device`` in host memory. See the module's guarantees; any thread.

    Attributes:
        log: ``(stream, name)`` of the work run so far, in order; poison is named ``poison``.
        ran: how often work of each name has run.
        drop: asked at each ``wait``, ``record`` and ``keep`` (its name, stream, event or None, number of this kind's call
            from 0); True leaves it out. A record left out gives an event that orders nothing and has passed.
        link: what ``link_rate`` gives.
        cost: seconds that work takes: of its stream, its name, and the bytes that it writes (or reads, if it writes none).
    """

    torch = torch.device("cpu")
    is_cuda = False
    asynchronous = True

    def __init__(self, seed: int = 0, *, free_bytes: int = 1 << 30) -> None:
        self.log: list[tuple[str, str]] = []
        self.ran: Counter[str] = Counter()
        self.drop: Drop = drop_nothing
        self.cost: Cost = a_millisecond
        self.link: float | None = None
        self._free_bytes = free_bytes
        self._random = random.Random(seed)
        self._hosts = Hosts()
        self._lock = threading.RLock()  # guards all below; held while work runs
        self._memory = Allocator(self._hosts, self._random)
        self._streams: list[SimulatedStream] = []
        self._calls: Counter[str] = Counter()
        self._running: Work | None = None
        self._default = self.stream("default")

    # ---- streams and events ---------------------------------------------------------------------------------

    def stream(self, name: str, *, high_priority: bool = False) -> SimulatedStream:
        del high_priority
        with self._lock:
            if any(name == stream.name for stream in self._streams):
                name = f"{name}#{len(self._streams)}"
            # Unequal weights let one stream fall far behind another, as unequal loads do.
            stream = SimulatedStream(name, weight=self._random.choice((1, 4, 64)))
            self._streams.append(stream)
            return stream

    def current(self) -> SimulatedStream:
        return self._hosts.current().stream or self._default

    @contextlib.contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[SimulatedStream]:
        host = self._hosts.current()
        before, host.stream = host.stream, stream
        try:
            yield stream
        finally:
            host.stream = before

    def record(self, stream: SimulatedStream, *, timing: bool = False) -> SimulatedEvent:
        with self._begin():
            event = SimulatedEvent(self, f"event {self._calls['record']} of {stream}", timing, self.now())
            if self._dropped("record", stream, event):
                event.passed_at = event.since
                return event
            stream.clock = event.clock = joined(stream.clock, self._hosts.current().clock)
            stream.queue.append(Mark(event))
            return event

    def recycle(self, event: Any) -> None:
        event.recycled = True

    def now(self) -> float:
        return self._hosts.current().time

    def spend(self, seconds: float) -> None:
        """The calling host works for so long."""
        self._hosts.current().time += seconds

    def wait(self, stream: SimulatedStream, event: Any) -> None:
        if event is PASSED:
            return
        with self._begin():
            if not self._dropped("wait", stream, event):
                stream.clock = joined(stream.clock, event.clock, self._hosts.current().clock)
                stream.queue.append(Wait(event))

    def query_event(self, event: SimulatedEvent) -> bool:
        """``event.query()``: runs nothing; True orders the calling host after the event."""
        with self._begin():
            if event.passed_at is None:
                return False
            host = self._hosts.current()
            host.clock = joined(host.clock, event.clock)
            return True

    def wait_for_event(self, event: SimulatedEvent) -> None:
        """``event.synchronize()``: runs runnable work, needed or not, until the event has passed."""
        with self._lock:
            while not self.query_event(event):
                self.step()
            host = self._hosts.current()
            host.time = max(host.time, event.passed_at or 0.0)

    # ---- memory ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        with self._begin():
            return self._memory.empty(self.current(), shape, dtype)

    def pinned(self, nbytes: int) -> Tensor:
        with self._begin():
            return self._memory.pinned(nbytes)

    def keep(self, tensor: Tensor, stream: SimulatedStream) -> None:
        with self._begin():
            block = self._memory.find(tensor)
            if block is None or stream in (block.home, *block.kept):
                return  # its own stream's order protects it already, as on CUDA
            if not self._dropped("keep", stream, None):
                block.kept.append(stream)

    def holds(self, tensor: Tensor) -> bool:
        block = self._memory.find(tensor)
        return block is not None and block.home is not None

    def host_reads(self, tensor: Tensor) -> None:
        self._host_touches(tensor, write=False)

    def host_writes(self, tensor: Tensor) -> None:
        self._host_touches(tensor, write=True)

    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def blocks(self) -> int:
        """Blocks in existence, pinned ones included: the allocator is at rest when it stops growing."""
        with self._begin():
            return len(self._memory)

    @property
    def races(self) -> list[RaceError]:
        """Every RaceError so far, swallowed ones too."""
        return list(self._memory.races)

    def label(self, tensor: Tensor, name: str) -> None:
        """Let errors call the block of ``tensor`` ``name``."""
        block = self._memory.find(tensor)
        if block is None:
            raise ValueError(f"{name!r} is not memory of this device; label what empty() or pinned() gave")
        block.label = name

    # ---- work -----------------------------------------------------------------------------------------------

    def launch(self, name: str, fn: Callable[[], Any], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        with self._begin():
            if self._running is not None:
                raise ContractError(f"{self._running.name!r} launches {name!r} while it runs; launched work launches nothing")
            stream = self.current()
            clock, time = stream.next(self._hosts.current().clock)
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._memory.touch(tensor, clock, stream.actor, time, name, write)
            nbytes = sum(tensor.numel() * tensor.itemsize for tensor in writes or reads)
            work = Work(name, since=self.now(), nbytes=nbytes)
            work.fn = taken(fn, lambda tensor: self._memory.given(work, tensor, reads, writes))
            stream.queue.append(work)

    def copy(self, out: Tensor, source: Tensor) -> None:
        if out.shape != source.shape or out.dtype != source.dtype:
            given = f"{tuple(source.shape)} {source.dtype} to {tuple(out.shape)} {out.dtype}"
            raise ValueError(f"copy of {given}: shape and dtype must be the same; cast or reshape in a launch")
        self.launch("copy", lambda: out.copy_(source), reads=[source], writes=[out])

    def step(self) -> bool:
        """Run one runnable thing (work, or the passing of an event), chosen by the seed; False when nothing is left."""
        with self._begin():
            runnable = [stream for stream in self._streams if stream.runnable()]
            if not runnable:
                return False
            stream = self._random.choices(runnable, [stream.weight for stream in runnable])[0]
            self._run(stream, stream.queue.popleft())
            return True

    def drain(self) -> None:
        """Run everything. Orders no host: use events for that."""
        while self.step():
            pass

    def link_rate(self) -> float | None:
        return self.link

    def capturing(self) -> bool:
        return False

    # ---- hosts ----------------------------------------------------------------------------------------------

    def host(self, name: str) -> AbstractContextManager[None]:
        """Inside the block the calling thread acts as the host ``name``, with its own clock and current stream."""
        return self._hosts.play(name)

    def lock(self) -> HostLock:
        """A lock that orders the hosts that take it: use it like ``threading.Lock``, also below a Condition."""
        return HostLock(self._hosts.current)

    def enter_thread(self) -> None:
        with self._begin():
            self._hosts.start()

    @staticmethod
    def site() -> str:
        """For use in ``drop``: ``file:line`` of the call that is being decided on."""
        frame = sys._getframe(1)
        for inside in (False, True):  # up through drop itself, then through this file
            while frame.f_back is not None and (frame.f_code.co_filename == __file__) == inside:
                frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    # ---- inside ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _begin(self) -> Iterator[None]:
        """The lock, and the dead buried: so starts every call."""
        with self._lock:
            self._memory.bury()
            yield

    def _dropped(self, kind: str, stream: SimulatedStream, event: SimulatedEvent | None) -> bool:
        number = self._calls[kind]
        self._calls[kind] += 1
        return self.drop(kind, stream, event, number)

    def _host_touches(self, tensor: Tensor, write: bool) -> None:
        with self._begin():
            host = self._hosts.current()
            clock, time = host.next()
            self._memory.touch(tensor, clock, host.actor, time, "host access", write)

    def _run(self, stream: SimulatedStream, entry: Work | Mark | Wait) -> None:
        if isinstance(entry, Mark):
            entry.event.passed_at = stream.time = max(stream.time, entry.event.since)
        elif isinstance(entry, Work) and entry.fn is not None:
            self._running = entry
            self.log.append((stream.name, entry.name))
            self.ran[entry.name] += 1
            if not entry.free:
                stream.time = max(stream.time, entry.since) + self.cost(stream.name, entry.name, entry.nbytes)
            try:
                entry.fn()
            finally:
                self._running = None
                self._memory.drop(entry)
            self._memory.check_read_only(entry)
