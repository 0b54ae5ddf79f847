"""A host without threads: producer, writer and device work advance in an order that a seed decides.

The tasks are the same generators that the threads run, so every order of waits and records that is tested here is the
one that runs on CUDA.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, final

from rowferry.pipeline._engine import Predicate, Task, pause
from rowferry.stores._device_contract import Event
from rowferry.stores.testing import SimulatedDevice


class Deadlock(AssertionError):
    """Nothing can move, and the consumer still waits."""


class _Actor:
    def __init__(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        self.name = name
        self.task = task
        self.on_escape = on_escape
        self.pending: Predicate | Event | None = None
        self.active = False  # inside a step, stopped at a lock


class _Preempting:
    """A lock after whose release anybody else may run first, as threads are preempted."""

    def __init__(self, lock: AbstractContextManager[Any], preempt: Callable[[], None]) -> None:
        self._lock = lock
        self._preempt = preempt

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)
        self._preempt()


@final
class SimulatedHost:
    """``Host`` for a ``SimulatedDevice``. The consumer is the calling thread; the others move while it waits or pauses.

    Args:
        device: what work runs on.
        seed: decides who moves next.
    """

    inline = False

    def __init__(self, device: SimulatedDevice, seed: int) -> None:
        self._plain, self._ended = device.lock(), device.lock()
        self.lock = _Preempting(self._plain, self._preempt)
        self._device = device
        self._random = random.Random(seed)
        self._slow = self._random.choice(("nobody", "producer", "writer", "device"))
        self._actors: list[_Actor] = []
        self.escaped: list[BaseException] = []

    def start(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        def escape(error: BaseException) -> None:
            self.escaped.append(error)
            on_escape(error)

        self._actors.append(_Actor(name, task, escape))

    def notify(self) -> None:
        pass

    def _preempt(self) -> None:
        """Whoever released the lock is stopped there, and others may move."""
        while self._random.random() < 0.3 and self._move():
            pass

    def wait(self, ready: Predicate, timeout: float | None = None) -> bool:
        del timeout
        while not self._holds(ready):
            if not self._move():
                raise Deadlock(f"the consumer waits and nothing can move: {[actor.name for actor in self._actors]} wait too")
        return True

    def synchronize(self, event: Event) -> None:
        while not event.query():
            if not self._move():
                raise Deadlock(f"the consumer waits for {event} and nothing can move")

    def spread(self, fn: Callable[[Any], None], parts: Iterable[Any], *, most: int) -> None:
        del most
        for part in parts:
            fn(part)

    def pause(self, most: int = 12) -> None:
        """The consumer computes: others make some moves."""
        for _ in range(self._random.randrange(most)):
            if not self._move():
                return

    def stop(self, timeout: float) -> list[str]:
        del timeout
        for actor in self._actors:
            with self._device.host(actor.name):
                self._finish(actor)
                self._ends()
        self._actors.clear()
        self._ends()  # what threads did is before what follows, for they are joined
        return []

    def _ends(self) -> None:
        with self._ended:
            pass

    def _finish(self, actor: _Actor) -> None:
        """What the threads do at shutdown: go on while nothing blocks, else end."""
        actor.active = True
        while actor.pending is None or (actor.pending is not pause and self._passed(actor)):
            try:
                actor.pending = next(actor.task)
            except StopIteration:
                return
        actor.task.close()

    def _holds(self, predicate: Predicate) -> bool:
        with self._plain:
            return predicate()

    def _passed(self, actor: _Actor) -> bool:
        condition = actor.pending
        if condition is None:
            return True
        return self._holds(condition) if callable(condition) else condition.query()

    def _move(self) -> bool:
        """One move of somebody, or of the device; False when nobody can."""
        choices: list[_Actor | None] = [*self._actors, None, None]
        self._random.shuffle(choices)
        if self._random.random() < 0.9:  # one of them is slow in this run
            choices.sort(key=lambda actor: (actor.name if actor else "device") == self._slow)
        for actor in choices:
            if actor is None:
                if self._device.step():
                    return True
            elif not actor.active and self._step(actor):
                return True
        return False

    def _step(self, actor: _Actor) -> bool:
        with self._device.host(actor.name):
            if not self._passed(actor):
                return False
            actor.active = True
            try:
                actor.pending = next(actor.task)
            except StopIteration:
                self._actors.remove(actor)
                self._ends()
            except BaseException as error:
                self._actors.remove(actor)
                self._ends()
                actor.on_escape(error)
            finally:
                actor.active = False
            return True
