"""Batches of 20 rows of 64 float32: the iterator's own cost, against indexing on the host and then ``.to()``.

Both are timed in turns in one run, so that a busy machine is busy for both. Values are checked before.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from _common import Options, arguments, report, save

import rowferry as rf
from rowferry._bench.clock import NEVER
from rowferry._bench.peers import PEERS, Peered, table_of
from rowferry._bench.reading import Ferried, Way, check, reader, rows_of
from rowferry._bench.workloads import uniform
from rowferry.stores._devices import device_for

ROWS, DIMENSION, BATCH = 1_000_000, 64, 20
BATCHES = 20_000
WAYS: dict[str, dict[str, Any]] = {"windows": {}, "lookahead=0": {"lookahead": 0}}
SLOW = {"lookahead=0": 20}  # a window a batch: so many times fewer batches say as much


def in_turns(ways: dict[str, Way], options: Options) -> dict[str, list[float]]:
    """Seconds a batch of each way, a run after the other, over and over."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    count = options.batches(BATCHES)
    for _ in range(options.runs):
        for name, way in ways.items():
            batches, seconds = reader(way, options.device)(max(count // SLOW.get(name, 1), 1), NEVER)
            found[name].append(seconds / batches)
    return found


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    rows = ROWS // (100 if options.smoke else 1)
    store = rf.PinnedStore.empty((rows, DIMENSION), torch.float32).init_(torch.nn.init.normal_, seed=0)
    ring = uniform(rows, BATCH, 1024)
    plain = PEERS[0]
    table = table_of(store, device_for(options.device))
    ways: dict[str, Way] = {plain.name: Peered(plain, table, ring)}
    ways |= {name: Ferried(store, ring, options.device, **settings) for name, settings in WAYS.items()}
    for name, way in ways.items():
        check(way, ring, rows_of(store), name, options.batches(2_000 // SLOW.get(name, 1)))
    found = in_turns(ways, options)
    results = []
    for name in WAYS:
        ratios = [mine / other for mine, other in zip(found[name], found[plain.name], strict=True)]
        results.append(
            report(
                {
                    "work": f"{BATCH} x {DIMENSION} float32, {name}",
                    "ratio_to_host_index": statistics.median(ratios),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "us_a_batch": 1e6 * statistics.median(found[name]),
                    "us_host_index": 1e6 * statistics.median(found[plain.name]),
                }
            )
        )
    for way in ways.values():
        way.close()
    save("small_batches", options, results, seed=0, rows=rows)


if __name__ == "__main__":
    main()
