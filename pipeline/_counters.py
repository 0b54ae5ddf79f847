"""Live counts of one pipeline, and the snapshot of them that users get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from ._overflow import Overflow
from ._passage import Cause
from ._stats import Stats


@final
@dataclass
class Counters:
    """Counts since the pipeline was made; fields as in ``Stats``. Each is written by one thread; a snapshot may be a batch old.

    Args:
        now: the host's clock.
        overflow: counts what casts make inf, if asked to.
    """

    now: Callable[[], float]
    overflow: Overflow | None = None
    batches: int = 0
    rows: int = 0
    bytes: int = 0
    windows: int = 0
    rows_distinct: int = 0
    bytes_distinct: int = 0
    rows_fetched: int = 0
    bytes_fetched: int = 0
    rows_carried: int = 0
    bytes_carried: int = 0
    rows_drained: int = 0
    bytes_drained: int = 0
    drains: int = 0
    seconds: float = 0.0
    wait_seconds: dict[str, float] = field(default_factory=dict)
    blocked_seconds: float = 0.0
    fetch_seconds: float = 0.0
    drain_seconds: float = 0.0
    exposed_seconds: float = 0.0
    batches_in_window: int = 0
    _epoch_since: float | None = None

    def served(self, rows: int, nbytes: int) -> None:
        """Rows of one table were given to the user. What gives them counts the batches."""
        self.rows += rows
        self.bytes += nbytes

    def began(self, batches: int, rows: int, nbytes: int) -> None:
        """A window became current: its batches, its distinct rows, and their bytes."""
        self.windows += 1
        self.batches_in_window = batches
        self.rows_distinct += rows
        self.bytes_distinct += nbytes

    def fetched(self, rows: int, row_nbytes: int) -> None:
        """Rows of one column were read from their store."""
        self.rows_fetched += rows
        self.bytes_fetched += rows * row_nbytes

    def carried(self, rows: int, row_nbytes: int) -> None:
        """Rows were copied from an older slot."""
        self.rows_carried += rows
        self.bytes_carried += rows * row_nbytes

    def drained(self, rows: int, row_nbytes: int) -> None:
        """Rows of one column, a list of them, went to their store."""
        self.drains += 1
        self.rows_drained += rows
        self.bytes_drained += rows * row_nbytes

    def waited(self, cause: Cause, seconds: float) -> None:
        """The consumer waited for ``cause``."""
        self.wait_seconds[cause] = self.wait_seconds.get(cause, 0.0) + seconds

    def epoch_begins(self) -> None:
        """The clock of ``seconds`` runs from here."""
        self._epoch_since = self.now()

    def epoch_ends(self) -> None:
        """... to here."""
        if self._epoch_since is not None:
            self.seconds += self.now() - self._epoch_since
            self._epoch_since = None

    def snapshot(self, **fixed: Any) -> Stats:
        """The counts now, with what only the pipeline knows."""
        seconds = self.seconds + (self.now() - self._epoch_since if self._epoch_since is not None else 0.0)
        ours = ("now", "overflow", "seconds", "wait_seconds", "_epoch_since")
        live = {name: value for name, value in vars(self).items() if name not in ours}
        made_inf = self.overflow.counted if self.overflow is not None else None
        return Stats(seconds=seconds, wait_seconds=dict(self.wait_seconds), values_made_inf=made_inf, **live, **fixed)
