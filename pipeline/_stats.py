"""What a pipeline did: the frozen snapshot that users get."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, final

from ._verdict import verdict

_STATES: Final = frozenset(
    ("batches_in_window", "depth", "mover", "mover_why", "device", "link_gbps", "bytes_staging", "bytes_pinned", "bytes_plans")
)  # as they are at the moment; the other fields count


@final
@dataclass(frozen=True)
class Stats:
    """A snapshot of ``pipe.stats()``. Counts are since the pipeline was made; ``since`` takes a part; ``as_dict`` is plain.

    Times of a GPU are those of events on its streams, read when they have passed: taking a snapshot waits for nothing, and
    what is still under way is not in it. At the end of an epoch all is.
    """

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
    values_made_inf: int | None
    """Finite values that a cast on the device made infinite, on the way to a batch or back into a store's dtype; of
    those windows that have passed. None unless the pipeline was made with ``count_inf=True``."""
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
    depth: int
    """Slots; 0 for the mover ``local``."""
    mover: str
    """How rows cross: local, copy, zero-copy, or several joined by a comma."""
    mover_why: str
    """Why, in words, with the rates that were measured; by column where there are several."""
    device: str
    """Where batches are."""
    link_gbps: float | None
    """1e9 bytes a second that the copy engine brings from pinned memory to the device, measured by some 10 ms of copies
    when the first pipeline of the process was made on it; None where nothing crosses a link."""
    bytes_staging: int
    """Device bytes of the slots."""
    bytes_pinned: int
    """Page-locked host bytes of staging (ordinary memory without CUDA). Stores are not counted."""
    bytes_plans: int
    """Device bytes of the plans of windows that are under way now."""

    @property
    def waited(self) -> float:
        """Seconds that the training waited in all."""
        return sum(self.wait_seconds.values())

    @property
    def transfer_seconds(self) -> float:
        """Seconds that fetches and drains ran; both count where they run beside each other."""
        return self.fetch_seconds + self.drain_seconds

    @property
    def hidden_share(self) -> float:
        """The share of ``transfer_seconds`` that ran while the training did not wait for it; 1.0 when none ran."""
        if not self.transfer_seconds:
            return 1.0
        return max(self.transfer_seconds - self.exposed_seconds, 0.0) / self.transfer_seconds

    @property
    def fetch_gbps(self) -> float:
        """1e9 bytes a second while fetches ran."""
        return self.bytes_fetched / self.fetch_seconds / 1e9 if self.fetch_seconds else 0.0

    @property
    def drain_gbps(self) -> float:
        """1e9 bytes a second while drains ran."""
        return self.bytes_drained / self.drain_seconds / 1e9 if self.drain_seconds else 0.0

    @property
    def link_share(self) -> float | None:
        """The faster of ``fetch_gbps`` and ``drain_gbps`` as a share of ``link_gbps``; None without a link."""
        return max(self.fetch_gbps, self.drain_gbps) / self.link_gbps if self.link_gbps else None

    @property
    def verdict(self) -> str:
        """One sentence: what limits, and what would change it."""
        return verdict(self)

    def since(self, earlier: Stats) -> Stats:
        """What was counted after ``earlier``, a snapshot of the same pipeline; states (memory, mover, ...) are of now."""
        changes: dict[str, Any] = {}
        for name in (field.name for field in fields(self) if field.name not in _STATES):
            now, before = getattr(self, name), getattr(earlier, name)
            if isinstance(now, dict):
                changes[name] = {key: value - before.get(key, 0.0) for key, value in now.items()}
            elif now is not None:
                changes[name] = now - before
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """All fields and properties."""
        derived = ("waited", "transfer_seconds", "hidden_share", "fetch_gbps", "drain_gbps", "link_share", "verdict")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
