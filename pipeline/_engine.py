"""Who runs the producer and the writer. The only file that starts and joins threads.

A *task* is a generator: its code runs between yields, and what it yields says what to wait for: an event of the
device, or a predicate over shared state. So the order of waits is written once, and three hosts can run it: threads
(here), the caller's own thread (here, for ``lookahead=0``), and a simulated scheduler (``testing``).

Guarantees:
- A predicate is evaluated under ``lock``, again after each ``notify``; shutdown ends every wait, without polling.
- ``stop`` ends and joins every thread, or returns the names of those that are stuck inside a store. A task goes on as long
  as nothing makes it wait, to the next ``pause`` at most.

Assumes:
- Shared state changes only under ``lock``, and whoever changes it calls ``notify`` after.
- A task handles its own errors. What escapes is handed to ``on_escape`` so that nobody waits for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

from rowferry.stores._device_contract import Device, Event

Predicate = Callable[[], bool]
Task = Generator[Predicate | Event, None, None]


def pause() -> bool:
    """Yielded between long calls: waits for nothing, lets others in, and a task ends here when its host is stopping."""
    return True


class Host(Protocol):
    """Runs tasks and lets the consumer wait for them. See the module's guarantees."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards the state that tasks and consumer share. Held for decisions, never while acting."""

    @property
    def inline(self) -> bool:
        """Whether tasks run only while the consumer waits."""

    def start(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        """Run ``task`` until it returns."""

    def notify(self) -> None:
        """Shared state changed. Not under the lock."""

    def wait(self, ready: Predicate, timeout: float | None = None) -> bool:
        """Block the consumer until ``ready()``; False when ``timeout`` seconds have passed first."""

    def synchronize(self, event: Event) -> None:
        """Block the consumer until ``event`` has passed."""

    def spread(self, fn: Callable[[Any], None], parts: Iterable[Any], *, most: int) -> None:
        """``fn`` of each part, at most ``most`` side by side where the host has threads. Each a long call without the GIL."""

    def stop(self, timeout: float) -> list[str]:
        """End all tasks at their next wait or ``pause``. Names of threads that did not end in ``timeout`` seconds."""


@final
class Threads:
    """One daemon thread a task, and ``threads`` more for ``spread``, started when first needed."""

    inline = False

    def __init__(self, device: Device, threads: int) -> None:
        self.lock = threading.Condition()
        self._device = device
        self._threads = threads
        self.stopping = False  # under lock; ends every wait
        self._started: list[threading.Thread] = []
        self._parts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._helpers = 0  # under lock

    def start(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        self._launch(f"rowferry-{name}", lambda: self._drive(task, on_escape))

    def notify(self) -> None:
        with self.lock:
            self.lock.notify_all()

    def wait(self, ready: Predicate, timeout: float | None = None) -> bool:
        with self.lock:
            return self.lock.wait_for(ready, timeout)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def spread(self, fn: Callable[[Any], None], parts: Iterable[Any], *, most: int) -> None:
        todo = list(parts)
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        if not self._hand_out([_reporting(fn, part, done) for part in todo[1:]], min(self._threads, most) - 1):
            for part in todo:
                fn(part)
            return
        _reporting(fn, todo[0], done)()
        errors = [error for error in (done.get() for _ in todo) if error is not None]
        if errors:
            raise errors[0]

    def _hand_out(self, calls: Sequence[Callable[[], None]], helpers: int) -> bool:
        """Leave ``calls`` to at most ``helpers`` threads; False when there is none, or they are about to end."""
        with self.lock:  # several tasks hand out; and nothing may come behind what ``stop`` tells the threads
            if self.stopping or not calls or helpers < 1:
                return False
            while self._helpers < min(helpers, len(calls)):
                self._helpers += 1
                self._launch(f"rowferry-gather-{self._helpers}", self._help)
            for call in calls:
                self._parts.put(call)
        return True

    def stop(self, timeout: float) -> list[str]:
        with self.lock:
            if not self.stopping:
                for _ in range(self._helpers):
                    self._parts.put(None)
            self.stopping = True
            self.lock.notify_all()
        deadline = time.monotonic() + timeout
        here = threading.current_thread()
        for thread in self._started:
            if thread is not here:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return [thread.name for thread in self._started if thread.is_alive() and thread is not here]

    def _launch(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._enter, args=(target,), name=name, daemon=True)
        self._started.append(thread)
        thread.start()

    def _enter(self, target: Callable[[], None]) -> None:
        self._device.enter_thread()
        target()

    def _drive(self, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        try:
            for condition in task:
                if not callable(condition):
                    condition.synchronize()
                elif not self._came_true(condition):
                    break
        except BaseException as error:
            on_escape(error)
        finally:
            task.close()
            self.notify()

    def _came_true(self, condition: Predicate) -> bool:
        """Wait for ``condition``; False when the host stops while it is still false, or the task pauses."""
        with self.lock:
            self.lock.wait_for(lambda: self.stopping or condition())
            return not self.stopping or (condition is not pause and condition())

    def _help(self) -> None:
        while (part := self._parts.get()) is not None:
            part()


def _reporting(fn: Callable[[Any], None], part: Any, done: queue.SimpleQueue[BaseException | None]) -> Callable[[], None]:
    def run() -> None:
        try:
            fn(part)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    return run


@final
class Inline:
    """Tasks run in the caller's thread, a step at a time, only while the caller waits: no thread, no overlap."""

    inline = True

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._tasks: list[tuple[Task, Callable[[BaseException], None], list[Predicate | Event]]] = []

    def start(self, name: str, task: Task, on_escape: Callable[[BaseException], None]) -> None:
        del name
        self._tasks.append((task, on_escape, []))

    def notify(self) -> None:
        pass

    def wait(self, ready: Predicate, timeout: float | None = None) -> bool:
        del timeout  # nothing runs elsewhere, so there is nothing to wait for
        while not ready():
            if not any(self._step(entry, ready) for entry in list(self._tasks)):
                raise RuntimeError("the pipeline waits for itself; this is a bug in rowferry, please report it")
        return True

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def spread(self, fn: Callable[[Any], None], parts: Iterable[Any], *, most: int) -> None:
        del most
        for part in parts:
            fn(part)

    def stop(self, timeout: float) -> list[str]:
        del timeout
        for task, _, _ in self._tasks:
            task.close()
        self._tasks.clear()
        return []

    def _step(self, entry: tuple[Task, Callable[[BaseException], None], list[Predicate | Event]], ready: Predicate) -> bool:
        """Run one task until it must wait for somebody else, or ``ready()``. Whether it moved."""
        task, on_escape, pending = entry
        moved = False
        while not (moved and ready()):
            if pending:
                condition = pending[0]
                if callable(condition):
                    if not condition():
                        return moved
                else:
                    condition.synchronize()
                pending.clear()
            try:
                pending.append(next(task))
            except StopIteration:
                self._tasks.remove(entry)
                return True
            except BaseException as error:
                self._tasks.remove(entry)
                on_escape(error)
                return True
            moved = True
        return moved
