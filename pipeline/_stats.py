"""What a pipeline did: the frozen snapshot that users get."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final


@final
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
    bytes_distinct: int
    """Bytes of them."""
    rows_fetched: int
    """Rows read from stores, counted a column."""
    bytes_fetched: int
    """Bytes of them."""
    rows_carried: int
    """Rows copied from the slot of an older window instead of being read again."""
    bytes_carried: int
    """Bytes of them."""
    rows_drained: int
    """Rows written to stores, counted a column. Those that a kernel writes are counted by the device, and known here when
    it has passed; after ``flush()`` and at the end of an epoch all are."""
    bytes_drained: int
    """Bytes of them."""
    drains: int
    """Lists of changed rows written to stores, one a window and column."""
    seconds: float
    """Since the first ``next()``, without time between epochs."""
    wait_seconds: dict[str, float]
    """Seconds that the training waited, by cause: sampler, plan, host gather, link, store, drain, or cold start (all of
    the first window of an epoch). On a GPU: that the consumer's stream had nothing to do until a window was there; on
    a CPU: that ``next()`` blocked. With ``drain``, also what ``flush()`` and the end of an epoch waited."""
    blocked_seconds: float
    """Seconds that the consumer's thread blocked. A GPU may have been busy meanwhile with what it was given before."""
    fetch_seconds: float
    """Seconds that fetches ran, from when a window's slot was free to when it was filled."""
    drain_seconds: float
    """Seconds that drains ran."""
    exposed_seconds: float
    """Seconds of both in which the training waited for them; the others were hidden behind it."""
    batches_in_window: int
    """Batches of the newest window."""
    mover: str
    """How rows cross: local, copy, zero-copy, or several joined by a comma."""
    device: str
    """Where batches are."""
    bytes_staging: int
    """Device bytes of the slots."""
    bytes_pinned: int
    """Page-locked host bytes of staging (ordinary memory without CUDA)."""

    @property
    def waited(self) -> float:
        """Seconds that the training waited in all."""
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
