"""What a pipeline did: counters while it runs, and the frozen snapshot that users get."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, final

COLD = "cold start"


@dataclass(frozen=True)
class Stats:
    """A snapshot of ``pipe.stats()``. Counts are since the pipeline was made; ``as_dict`` gives plain values."""

    batches: int
    """Batches given to the user."""
    rows: int
    """Rows asked for by them, repeats counted, over all tables."""
    bytes: int
    """Bytes of those rows in the stores' dtypes."""
    windows: int
    """Windows begun; 0 for the mover ``local``."""
    rows_distinct: int
    """Distinct rows of the windows."""
    rows_fetched: int
    """Rows read from stores, counted a column."""
    bytes_fetched: int
    """Bytes of them."""
    rows_carried: int
    """Rows copied from the slot of an older window instead of being read again."""
    rows_drained: int
    """Rows written to stores by the host, counted a column; rows drained by a kernel are not known to the host."""
    bytes_drained: int
    """Bytes of them."""
    drains: int
    """Lists of changed rows written to stores, one a window and column."""
    seconds: float
    """Since the first ``next()``, without time between epochs."""
    wait_seconds: dict[str, float]
    """Seconds that ``next()`` blocked, by what the producer was doing: sampler, plan, slot, fetch, or cold start (all
    of the first batch of an epoch)."""
    batches_in_window: int
    """Batches of the newest window."""
    mover: str
    """How rows cross: local, copy, zero-copy, or several joined by a comma."""
    mover_why: str
    """Why, in words, with the rates that were measured; by column where there are several."""
    device: str
    """Where batches are."""
    bytes_staging: int
    """Device bytes of the slots."""
    bytes_pinned: int
    """Page-locked host bytes of staging (ordinary memory without CUDA)."""

    @property
    def waited(self) -> float:
        """Seconds that ``next()`` blocked in all."""
        return sum(self.wait_seconds.values())

    @property
    def verdict(self) -> str:
        """One sentence: what the training loop waited for."""
        if not self.batches:
            return "no batch was given out yet"
        if not self.seconds:
            return f"{self.batches} batches"
        rate = self.bytes / self.seconds / 1e9
        share = self.waited / self.seconds
        head = f"{self.batches} batches at {rate:.2f} GB/s by {self.mover}"
        if share < 0.02 or not self.wait_seconds:
            return f"{head}; the loop did not wait"
        cause = max(self.wait_seconds, key=lambda name: self.wait_seconds[name])
        return f"{head}; the loop waited {share:.0%} of the time, most for: {cause}"

    def as_dict(self) -> dict[str, Any]:
        """All fields, and ``waited`` and ``verdict``."""
        return {**asdict(self), "waited": self.waited, "verdict": self.verdict}


@final
@dataclass
class Counters:
    """Live counts. Each field is written by one thread; a snapshot may be a batch old."""

    batches: int = 0
    rows: int = 0
    bytes: int = 0
    windows: int = 0
    rows_distinct: int = 0
    rows_fetched: int = 0
    bytes_fetched: int = 0
    rows_carried: int = 0
    rows_drained: int = 0
    bytes_drained: int = 0
    drains: int = 0
    seconds: float = 0.0
    batches_in_window: int = 0
    wait_seconds: dict[str, float] = field(default_factory=dict)
    _doing: str = "plan"
    _waiting_since: float | None = None
    _cold: bool = False
    _epoch_since: float | None = None

    def served(self, rows: int, nbytes: int) -> None:
        """A batch was given to the user."""
        self.batches += 1
        self.rows += rows
        self.bytes += nbytes

    def began(self, batches: int, distinct: int) -> None:
        """A window became current."""
        self.windows += 1
        self.batches_in_window = batches
        self.rows_distinct += distinct

    def fetched(self, rows: int, row_nbytes: int) -> None:
        """Rows of one column were read from their store."""
        self.rows_fetched += rows
        self.bytes_fetched += rows * row_nbytes

    def carried(self, rows: int) -> None:
        """Rows were copied from an older slot."""
        self.rows_carried += rows

    def drained(self, rows: int | None, row_nbytes: int) -> None:
        """Rows of one column went to their store; None when only the device knows how many."""
        self.drains += 1
        self.rows_drained += rows or 0
        self.bytes_drained += (rows or 0) * row_nbytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The producer does ``name``: waits of the consumer meanwhile are its."""
        before = self._doing
        self._turn(name)
        try:
            yield
        finally:
            self._turn(before)

    @contextmanager
    def waiting(self, *, cold: bool) -> Iterator[None]:
        """The consumer blocks in ``next()``."""
        self._cold = cold
        self._waiting_since = time.perf_counter()
        try:
            yield
        finally:
            self._charge()
            self._waiting_since = None

    def epoch_begins(self) -> None:
        """The clock of ``seconds`` runs from here."""
        self._epoch_since = time.perf_counter()

    def epoch_ends(self) -> None:
        """... to here."""
        if self._epoch_since is not None:
            self.seconds += time.perf_counter() - self._epoch_since
            self._epoch_since = None

    def _turn(self, name: str) -> None:
        self._charge()
        self._doing = name

    def _charge(self) -> None:
        since = self._waiting_since
        if since is None:
            return
        now = time.perf_counter()
        cause = COLD if self._cold else self._doing
        self.wait_seconds[cause] = self.wait_seconds.get(cause, 0.0) + now - since
        self._waiting_since = now

    def snapshot(self, **fixed: Any) -> Stats:
        """The counts now, with what only the pipeline knows."""
        seconds = self.seconds + (time.perf_counter() - self._epoch_since if self._epoch_since is not None else 0.0)
        return Stats(
            batches=self.batches,
            rows=self.rows,
            bytes=self.bytes,
            windows=self.windows,
            rows_distinct=self.rows_distinct,
            rows_fetched=self.rows_fetched,
            bytes_fetched=self.bytes_fetched,
            rows_carried=self.rows_carried,
            rows_drained=self.rows_drained,
            bytes_drained=self.bytes_drained,
            drains=self.drains,
            seconds=seconds,
            wait_seconds=dict(self.wait_seconds),
            batches_in_window=self.batches_in_window,
            **fixed,
        )
