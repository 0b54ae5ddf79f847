"""Random rows of a pinned table through the iterator: share of the link, first batch, and what the loop waited.

Values are checked in every configuration before it is timed. A run is an epoch, timed from ``iter()``: the pipeline's
buffers are empty at its start and its end counts.
"""

from __future__ import annotations

import resource
import statistics
from typing import Any

import torch
from _common import Options, arguments, limit, report, save, speed

import rowferry as rf
from rowferry._bench.clock import timed
from rowferry._bench.reading import Ferried, check, reader, rows_of, stamped
from rowferry._bench.workloads import Ring, ring_length, truncated_zipf, uniform
from rowferry.stores._devices import device_for

ZIPF_RING = 256
WARM_BATCHES = 40


def measure(
    name: str, store: rf.Store, ring: Ring, batches: int, options: Options, rate: float, **settings: Any
) -> dict[str, Any]:
    """The median of a few epochs of ``batches`` batches."""
    with Ferried(store, ring, options.device, **settings) as way:
        check(way, ring, rows_of(store), name, options.batches(WARM_BATCHES))
        found = options.measure(reader(way, options.device), batches)
        stats = way.stats()
    return report(
        {
            "work": name,
            **speed(found, len(ring[0]) * store.row_nbytes, rate),
            "window": stats.batches_in_window,
            "mover": stats.mover,
            **{key: str(value) for key, value in settings.items()},
        }
    )


def first_batch(options: Options) -> dict[str, Any]:
    """Milliseconds from ``iter()`` to the first batch, shuffled over a billion rows, and the memory it took."""
    table = rf.PinnedStore.empty(((1 << 30) // (1024 if options.smoke else 1), 4), torch.uint8)
    with rf.Pipeline(table, batch_size=4096, shuffle=True, device=options.device) as pipe:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        taken = timed(lambda: next(iter(pipe)), device_for(options.device), options.runs)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return report(
        {
            "work": f"first batch of {len(table):,} shuffled rows",
            "ms": 1e3 * statistics.median(taken),
            "highest": 1e3 * max(taken),
            "host_mb": grown / 1e6,
        }
    )


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    results = [first_batch(options)]
    link = limit(options)
    rate = link.to_device
    for row_bytes, usual, batches in ((512, 131_072, 300), (512, 4_096, 6_000), (128, 131_072, 600), (2_048, 32_768, 300)):
        rows, batch = options.rows(row_bytes), options.ids(usual)
        store = stamped(rows, row_bytes)
        ring = uniform(rows, batch, ring_length(batch))
        results.append(measure(f"{batch} x {row_bytes} B, uniform", store, ring, batches, options, rate))
        if (row_bytes, usual) == (512, 131_072):
            results.append(measure(f"{batch} x {row_bytes} B, copy", store, ring, 100, options, rate, mover="copy"))
            zipf = truncated_zipf(rows, batch, ZIPF_RING)
            results.append(measure(f"{batch} x {row_bytes} B, Zipf 1.05", store, zipf, 600, options, rate))
        store.close()
        del store
    save("reading", options, results, link=link._asdict(), seed=0, table_bytes=options.rows(1))


if __name__ == "__main__":
    main()
