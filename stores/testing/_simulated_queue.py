"""What the simulated device schedules: streams, the entries of their queues, events, and the hosts that fill them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

import torch

from ._simulated_clocks import Clock, joined


class _Owner(Protocol):
    """What an event asks of its device."""

    def query_event(self, event: SimulatedEvent) -> bool: ...

    def wait_for_event(self, event: SimulatedEvent) -> None: ...


@final
class SimulatedEvent:
    """See ``Event``. ``passed_at``: the simulated second at which it passed, None before; ``since``: when it was recorded."""

    def __init__(self, owner: _Owner | None, name: str, timing: bool, since: float) -> None:
        self.name = name
        self.clock: Clock = {}
        self.since = since
        self.passed_at: float | None = None
        self.recycled = False
        self._owner = owner
        self._timing = timing

    def query(self) -> bool:
        assert self._owner is not None
        assert not self.recycled
        return self._owner.query_event(self)

    def synchronize(self) -> None:
        assert self._owner is not None
        self._owner.wait_for_event(self)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Simulated milliseconds in between, which work and hosts spent."""
        if self.recycled or end.recycled:
            raise ValueError(f"elapsed_time from {self} to {end}: one of them was recycled")
        if not (self._timing and end._timing) or self.passed_at is None or end.passed_at is None:
            raise ValueError(f"elapsed_time from {self} to {end}: both must be recorded with timing=True and have passed")
        return (end.passed_at - self.passed_at) * 1e3

    def __repr__(self) -> str:
        return f"<{self.name}, {'pending' if self.passed_at is None else 'passed'}>"


@final
class Work:
    """A launched function. ``fn`` is dropped when it has run.

    Attributes:
        since: the second at which it was launched.
        nbytes: bytes that it moves.
        free: it takes no time: poison, which only this device has.
    """

    def __init__(
        self, name: str, fn: Callable[[], Any] | None = None, *, since: float = 0.0, nbytes: int = 0, free: bool = False
    ) -> None:
        self.name = name
        self.fn = fn
        self.since = since
        self.nbytes = nbytes
        self.free = free
        self.read_only: list[tuple[torch.Tensor, int, str]] = []
        """Tensors that ``fn`` may not change: alias, its version at launch, what errors call it."""


@final
class Mark:
    """The place in a queue where ``event`` passes."""

    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event


@final
class Wait:
    """The place in a queue that only what comes after ``event`` may pass."""

    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event


@final
class SimulatedStream:
    """Entries in launch order, and the clock of the last one."""

    def __init__(self, name: str, weight: int) -> None:
        self.name = name
        self.weight = weight
        self.time = 0.0
        """The simulated second at which its work so far is done."""
        self.clock: Clock = {}
        self.queue: deque[Work | Mark | Wait] = deque()

    def next(self, host: Clock) -> tuple[Clock, int]:
        """The clock of one more launch by a host at ``host``, and its time on this stream."""
        clock = joined(self.clock, host)
        time = clock[self.actor] = clock.get(self.actor, 0) + 1
        self.clock = clock
        return clock, time

    @property
    def actor(self) -> str:
        """Its name in clocks."""
        return f"stream {self.name}"

    def runnable(self) -> bool:
        """Whether the next entry may run; waits for events that have passed are gone through."""
        while self.queue:
            head = self.queue[0]
            if not isinstance(head, Wait):
                return True
            if head.event.passed_at is None:
                return False
            self.queue.popleft()
            self.time = max(self.time, head.event.passed_at)
        return False

    def __repr__(self) -> str:
        return self.name


@final
class Host:
    """A host thread, or a task that plays one."""

    def __init__(self, name: str) -> None:
        self.actor = f"host {name}"
        self.clock: Clock = {}
        self.stream: SimulatedStream | None = None
        self.time = 0.0
        """Its simulated second."""

    def next(self) -> tuple[Clock, int]:
        """The clock of one more access, and its time on this host."""
        time = self.clock.get(self.actor, 0) + 1
        self.clock = {**self.clock, self.actor: time}
        return self.clock, time


@final
class Hosts:
    """Who the calling thread is. A thread is a host of its own, until it plays another."""

    def __init__(self) -> None:
        self._known: dict[str, Host] = {}
        self._numbers = itertools.count(2)
        self._local = threading.local()

    def current(self) -> Host:
        """The calling thread's host. Takes no lock: finalizers call it."""
        host: Host | None = getattr(self._local, "host", None)
        if host is None:
            name = threading.current_thread().name
            name = name if name not in self._known else f"{name}#{next(self._numbers)}"
            host = self._known[name] = self._local.host = Host(name)
        return host

    @contextlib.contextmanager
    def play(self, name: str) -> Iterator[None]:
        """Inside the block the calling thread is the host ``name``."""
        before = self.current()
        self._local.host = self._known.setdefault(name, Host(name))
        try:
            yield
        finally:
            self._local.host = before

    def start(self) -> None:
        """Order the calling thread's host after its starter, whom we don't know: after everybody's past, then."""
        host = self.current()
        host.clock = joined(host.clock, *(other.clock for other in list(self._known.values())))


@final
class HostLock:
    """``threading.Lock`` that orders who takes it after all who released it before."""

    def __init__(self, host: Callable[[], Host]) -> None:
        self._lock = threading.Lock()
        self._host = host
        self._clock: Clock = {}  # guarded by _lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._lock.acquire(blocking, timeout):
            return False
        host = self._host()
        host.clock = joined(host.clock, self._clock)
        return True

    def release(self) -> None:
        self._clock = joined(self._clock, self._host().clock)
        self._lock.release()

    def locked(self) -> bool:
        """Whether someone holds it."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()
