"""What ``rowferry bench`` measures, in order: reading, writing, both, peers, overlap. Each work gets a slice of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from rowferry.stores import Store
from rowferry.stores._device_contract import Device

from .clock import Budget, Figures, Slice, Timing, clock, paced
from .link import copy_speed, memory_speed
from .overlap import RATIOS, Compute, compute_of, serve_seconds, step_run
from .peers import PEERS, Peer, Peered, Table
from .reading import Ferried, Way, check, reader, rows_of
from .sizes import Sizes
from .workloads import Ring, apart, truncated_zipf, uniform
from .writing import Writing

UNIFORM = "read, uniform"
_ZIPF_RING = 256
_APART_RING = 200

SHARE = "share of the limit"
STEP = "step / bound"


class Limit(NamedTuple):
    """GB/s of large copies: over the link, or where there is no GPU in host memory, which is then ``memory``."""

    kind: str
    to_device: float
    to_host: float
    both: float


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        store: rows are read from it and nothing is written to it.
        written: the table that is written; may be ``store``.
        table: ``store`` as peers see it.
        settings: passed to every pipeline.
    """

    store: Store
    written: Store
    table: Table
    device: Device
    sizes: Sizes
    limit: Limit
    settings: dict[str, Any] = field(default_factory=dict)


class Work(NamedTuple):
    """One thing that is measured: ``run(part)`` gives its figures within ``part``."""

    name: str
    group: str
    weight: float
    run: Callable[[Slice], dict[str, Any]]


def limit_of(device: Device) -> Limit:
    """Measured now."""
    if device.is_cuda:
        speed = copy_speed(device)
        return Limit("link", speed.to_device, speed.to_host, speed.both)
    copied = memory_speed(device) / 2  # bytes copied, as a link's are counted
    return Limit("memory", copied, copied, copied)


@final
class Suite:
    """All works on one setup. Iterating gives a result a work, as a dict; see ``docs/benchmarking.md``."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ring = uniform(len(setup.store), setup.sizes.batch, setup.sizes.ring())
        self._seconds_a_batch = 0.0  # of reading uniform rows: the transfer of overlap
        self._apart: Ring = []  # what is written, drawn once
        self._computes: dict[float, Compute] = {}  # by ratio
        self._serve: float | None = None
        self.works = [
            Work(UNIFORM, "reading", 2, lambda part: self._read(part, self._ring)),
            Work("read, Zipf", "reading", 2, self._read_zipf),
            Work("write", "writing", 2, lambda part: self._write(part, fetch=False)),
            Work("read, change and write", "writing", 2, lambda part: self._write(part, fetch=True)),
            *(Work(peer.name, "peers", 1, self._peer(peer)) for peer in PEERS),
            *(self._overlapping(ratio, ahead) for ratio in RATIOS for ahead in (True, False)),
        ]

    def results(self, budget: Budget) -> Iterator[dict[str, Any]]:
        """Measure; a work for which no time is left, or that can't be done here, has ``skipped`` in place of figures.

        The first is measured in any case: the others need its transfer.
        """
        weights = [work.weight for work in self.works]
        for number, work in enumerate(self.works):
            part = budget.slice(work.weight, sum(weights[number:]))
            result = work.run(part) if not number or budget.left() > 0 else {"skipped": "no time was left for it"}
            yield {"work": work.name, "group": work.group, **result}

    # ---- reading ------------------------------------------------------------------------------------------------------

    def _read(self, part: Slice, ring: Ring) -> dict[str, Any]:
        setup = self._setup
        with Ferried(setup.store, ring, setup.device.torch, **setup.settings) as way:
            check(way, ring, rows_of(setup.store), "rowferry")
            found = paced(reader(way, setup.device.torch), left_of(part))
            stats = way.stats()
        if ring is self._ring:
            self._seconds_a_batch = found.median
        return {**self._share(found, self._setup.limit.to_device), "mover": stats.mover, "window": stats.batches_in_window}

    def _read_zipf(self, part: Slice) -> dict[str, Any]:
        sizes = self._setup.sizes
        return self._read(part, truncated_zipf(len(self._setup.store), sizes.batch, sizes.ring(_ZIPF_RING)))

    # ---- writing ------------------------------------------------------------------------------------------------------

    def _write(self, part: Slice, *, fetch: bool) -> dict[str, Any]:
        setup = self._setup
        ring = self._apart = self._apart or apart(len(setup.written), setup.sizes.batch, setup.sizes.ring(_APART_RING))
        with Writing(setup.written, ring, setup.device.torch, fetch=fetch, **setup.settings) as writing:
            writing(1, part.stop)
            writing.check()
            found = paced(writing, left_of(part))
            writing.check()
            mover = writing.pipe.stats().mover
        limit = setup.limit.both if fetch else setup.limit.to_host
        return {**self._share(found, limit, len(ring[0]) * (2 if fetch else 1)), "mover": mover}

    # ---- overlap ------------------------------------------------------------------------------------------------------

    def _overlapping(self, ratio: float, ahead: bool) -> Work:
        name = f"compute/transfer {ratio:g}" + ("" if ahead else ", lookahead=0")
        return Work(name, "overlap", 1, lambda part: self._overlap(part, ratio, {} if ahead else {"lookahead": 0}))

    def _overlap(self, part: Slice, ratio: float, more: dict[str, Any]) -> dict[str, Any]:
        setup, transfer = self._setup, self._seconds_a_batch
        compute = self._computes.get(ratio) or compute_of(setup.device, ratio * transfer)
        self._computes[ratio] = compute
        if self._serve is None:
            self._serve = serve_seconds(setup.device, setup.sizes.batch, setup.store.row_shape, setup.store.dtype)
        serve = self._serve
        with Ferried(setup.store, self._ring, setup.device.torch, **setup.settings, **more) as way:

            def run(count: int, stop: float) -> Timing:
                return step_run(way, compute.step, setup.device, count, stop)

            found = paced(run, left_of(part))
        bound = max(compute.seconds + serve, transfer)
        parts = {"ms_compute": 1e3 * compute.seconds, "ms_serve": 1e3 * serve, "ms_transfer": 1e3 * transfer}
        return {**figures_of(STEP, "lower", found, 1 / bound), **parts}

    # ---- peers --------------------------------------------------------------------------------------------------------

    def _peer(self, peer: Peer) -> Callable[[Slice], dict[str, Any]]:
        def run(part: Slice) -> dict[str, Any]:
            table = self._setup.table
            if problem := peer.problem(table):
                return {"skipped": problem}
            way: Way = Peered(peer, table, self._ring)
            with contextlib.closing(way):
                check(way, self._ring, table.host, peer.name)
                found = paced(reader(way, table.device.torch), left_of(part))
            return {
                **self._share(found, self._setup.limit.to_device),
                "rowferry_is_times_as_fast": found.median / self._seconds_a_batch,
            }

        return run

    def _share(self, found: Figures, limit: float, rows: int | None = None) -> dict[str, Any]:
        """A speed as a share of ``limit`` GB/s; ``rows`` cross a batch, the batch's own by default."""
        nbytes = (self._setup.sizes.batch if rows is None else rows) * self._setup.store.row_nbytes
        return {**figures_of(SHARE, "higher", found, nbytes / limit / 1e9), "gb_s": nbytes / found.median / 1e9}


def left_of(part: Slice) -> Slice:
    """What remains of a slice after its preparations."""
    return Slice(max(part.stop - clock(), 0.0), part.stop)


def figures_of(measure: str, better: str, found: Figures, scale: float) -> dict[str, Any]:
    """A ratio: seconds a batch times ``scale`` where lower is better, ``scale`` over them where higher is."""

    def ratio(seconds: float) -> float:
        return seconds * scale if better == "lower" else scale / seconds

    ends = sorted((ratio(found.fastest), ratio(found.slowest)))
    return {
        "measure": measure,
        "better": better,
        "ratio": ratio(found.median),
        "lowest": ends[0],
        "highest": ends[1],
        "runs": found.runs,
        "ms": 1e3 * found.median,
    }
