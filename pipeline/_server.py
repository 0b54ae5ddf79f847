"""What serves the batches of one epoch, and its one ordered, idempotent teardown."""

from __future__ import annotations

import logging
from typing import Any, Protocol, final

from torch import Tensor

from ._consumer import Consumer
from ._engine import Host
from ._producer import produce
from ._requests import Requests
from ._run import Parts, Run
from ._serving import Taken
from ._slots import Slots
from ._source import Source
from ._writer import write

logger = logging.getLogger("rowferry")

STOP_SECONDS = 1.0  # reading stops within this, or its thread is stuck inside a store and is abandoned


class Server(Protocol):
    """What serves batches: ``LocalConsumer``, or ``Windowed``."""

    @property
    def fetch(self) -> bool:
        """Whether a writable batch comes with its rows."""

    @property
    def keeps_open(self) -> bool:
        """Whether ``next`` failed with a drain that the next call tries again; another failure ends the epoch."""

    def next(self) -> Taken:
        """The next batch's tensors; StopIteration at the end."""

    def write(self, taken: Taken, values: dict[tuple[int, int], Tensor]) -> None:
        """Put rows of the batch back."""

    def flush(self) -> None:
        """Return when all that was written is in the stores."""

    def finish(self, *, drain: bool, timeout: float | None = None) -> None:
        """End it: with ``drain``, first write what is left."""

    def plan_bytes(self) -> int:
        """Device bytes of the plans under way."""


@final
class Windowed:
    """A consumer with its producer and writer running. Guarantees: ``finish`` leaves no thread that is not stuck."""

    def __init__(self, parts: Parts, host: Host, requests: Requests) -> None:
        self.run = Run(parts, host, requests, Slots(parts.settings.depth))
        self._consumer = Consumer(self.run)
        self._finished = False
        parts.timeline.epoch_begins(host.lock)
        for movers in parts.movers:
            for mover in movers:
                mover.bind(host)
        host.start("producer", produce(self.run), self.run.escaped)
        if parts.settings.writable:
            host.start("writer", write(self.run), self.run.escaped)

    @property
    def fetch(self) -> bool:
        return self.run.parts.settings.fetch

    @property
    def keeps_open(self) -> bool:
        return self.run.failure is None and bool(self.run.jobs)

    def next(self) -> Taken:
        settings = self.run.parts.settings
        with self.run.parts.timeline.step():
            taken = self._consumer.next()
            if settings.inline and settings.writable and self.run.jobs:
                self._consumer.wait_drained()
        return taken

    def write(self, taken: Taken, values: dict[tuple[int, int], Tensor]) -> None:
        assert taken.window is not None
        with self.run.parts.timeline.range("write_back"):
            self._consumer.write(taken.window, taken.batch, values)

    def flush(self) -> None:
        self._consumer.flush()

    def plan_bytes(self) -> int:
        run = self.run
        with run.host.lock:
            windows = [] if self._finished else list(run.windows.values())
        return sum(
            tensor.numel() * tensor.itemsize for window in windows for table in window.tables for tensor in table.tensors()
        )

    def finish(self, *, drain: bool, timeout: float | None = None) -> None:
        """Steps, each with its reason: list the last window's rows (they are still only in its slot); wait for the
        writer (its source is the slots); then let both tasks end (they wait under a predicate that sees ``closing``).
        """
        if self._finished:
            return
        run, error = self.run, None
        if drain and run.parts.settings.writable:
            error = self._drain_last(timeout)
        self._finished = True
        with run.host.lock:
            run.closing = True
            run.jobs.clear()
        run.host.notify()
        stuck = self.stop(STOP_SECONDS)
        if stuck:
            logger.error("abandoned %s, stuck inside a store; its buffers are kept", ", ".join(stuck))
            _ABANDONED.append(self)
        run.parts.timeline.epoch_ends()
        if error is not None:
            raise error

    def stop(self, timeout: float) -> list[str]:
        """End the threads; names of those that did not in ``timeout`` seconds. Without any, all buffers are free again."""
        stuck = self.run.host.stop(timeout)
        if not stuck:
            self._consumer.settle()  # pinned buffers of work that was cut short must not be lent again before it has passed
            self.run.parts.pool.reclaim()
        return stuck

    def _drain_last(self, timeout: float | None) -> Exception | None:
        """Everything changed goes to the stores; each failed drain is tried once more. The error that remains."""
        run = self.run
        self._consumer.end_window()
        self._consumer.drain_kept()
        tried: Any = None
        while True:
            try:
                if self._consumer.wait_drained(timeout):
                    return None
                rows = self._consumer.rows_waiting()
                return TimeoutError(f"{rows} changed rows did not reach their stores in {timeout} seconds and are lost")
            except Exception as failed:
                job = run.jobs[0] if run.jobs else None
                if job is None or job is tried:
                    failed.add_note(f"{self._consumer.rows_waiting()} changed rows are lost: the pipeline was closed")
                    return failed
                tried = job


_ABANDONED: list[Windowed] = []  # their threads may still write to their buffers: never freed, on purpose


def close_opened(source: Source, parts: Parts | None) -> None:
    """Close the stores that the pipeline has opened itself, but for one that an abandoned thread may be inside of."""
    if not any(server.run.parts is parts for server in _ABANDONED):
        for store in source.opened:
            store.close()


def wait_for_abandoned(parts: Parts) -> None:
    """Block until threads that an earlier epoch of these parts left inside a store have come back from it.

    They write to slots and pinned pieces that the next epoch uses again.
    """
    for server in [server for server in _ABANDONED if server.run.parts is parts]:
        while stuck := server.stop(STOP_SECONDS):
            logger.warning("the next epoch waits for %s of an earlier one, still inside a store", ", ".join(stuck))
        _ABANDONED.remove(server)
