"""A host without threads in simulated time: who is earliest moves, and waiting takes as long as it would.

With work that takes what ``SimulatedDevice.cost`` says, and stores and samplers that call ``device.spend``, every time that
a pipeline measures is a number that a test can work out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from rowferry.pipeline._engine import Predicate, Task
from rowferry.stores._device_contract import Event
from rowferry.stores.testing import SimulatedDevice


class _Actor:
    def __init__(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        self.name = name
        self.task = task
        self.on_escape = on_escape
        self.pending: Predicate | Event | None = None
        self.blocked = False  # by a predicate that was not true when it was last asked


@final
class TimedHost:
    """``Host`` for a ``SimulatedDevice``. The consumer is the calling thread; the others move while it waits.

    A task that waits for an event goes on when that has passed, one that waits for a predicate when it has become true,
    at the second of whoever made it so. Guarantees that hold only if a task yields between spending time and telling
    others of it, as those of the pipeline do.

    Args:
        device: what work runs on.
        lanes: threads that ``spread`` has.
    """

    inline = False

    def __init__(self, device: SimulatedDevice, lanes: int = 1) -> None:
        self.lock = device.lock()
        self._device = device
        self._lanes = lanes
        self._actors: list[_Actor] = []

    def start(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        started = self._device.now()
        actor = _Actor(name, task, on_escape)
        self._actors.append(actor)
        with self._device.host(name):
            self._device.spend(max(started - self._device.now(), 0.0))

    def notify(self) -> None:
        """Who was blocked and can go on does so at this second, if it is not later already."""
        here = self._device.now()
        for actor in self._actors:
            if actor.blocked and callable(actor.pending) and self._holds(actor.pending):
                actor.blocked = False
                with self._device.host(actor.name):
                    self._catch_up(here)

    def wait(self, ready: Predicate, timeout: float | None = None) -> bool:
        del timeout
        while not self._holds(ready):
            reached = self._move()
            assert reached is not None, f"the consumer waits and nothing can move: {[actor.name for actor in self._actors]}"
            self._catch_up(reached)
        return True

    def compute(self, seconds: float) -> None:
        """The consumer's thread works for so long, and the others beside it."""
        until = self._device.now() + seconds
        while (actor := self._earliest()) is not None and self._time_of(actor) <= until:
            self._step(actor)
        self._device.spend(seconds)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def spread(self, fn: Callable[[Any], None], parts: Iterable[Any], *, most: int) -> None:
        start = self._device.now()
        lanes = [start] * max(min(self._lanes, most), 1)
        for part in parts:
            lane = lanes.index(min(lanes))
            self._set(lanes[lane])
            fn(part)
            lanes[lane] = self._device.now()
        self._set(max(lanes))

    def stop(self, timeout: float) -> list[str]:
        del timeout
        while self._move() is not None:
            pass
        for actor in self._actors:
            actor.task.close()
        self._actors.clear()
        return []

    def _set(self, second: float) -> None:
        self._device.spend(second - self._device.now())

    def _catch_up(self, second: float) -> None:
        self._device.spend(max(second - self._device.now(), 0.0))

    def _holds(self, predicate: Predicate) -> bool:
        with self.lock:
            return predicate()

    def _time_of(self, actor: _Actor) -> float:
        """The second at which it can go on."""
        with self._device.host(actor.name):
            here = self._device.now()
            if actor.pending is not None and not callable(actor.pending):
                actor.pending.synchronize()
                here = self._device.now()
        return here

    def _earliest(self) -> _Actor | None:
        free = [actor for actor in self._actors if not callable(actor.pending) or self._holds(actor.pending)]
        return min(free, key=self._time_of, default=None)

    def _move(self) -> float | None:
        """The earliest takes a step; the second that it has come to, None when all wait."""
        actor = self._earliest()
        return None if actor is None else self._step(actor)

    def _step(self, actor: _Actor) -> float:
        with self._device.host(actor.name):
            try:
                actor.pending = next(actor.task)
            except StopIteration:
                self._actors.remove(actor)
            except BaseException as error:
                self._actors.remove(actor)
                actor.on_escape(error)
            actor.blocked = callable(actor.pending) and not self._holds(actor.pending)
            return self._device.now()
