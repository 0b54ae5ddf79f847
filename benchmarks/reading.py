"""Random rows of a pinned table through the iterator: share of the link, first batch, and what the loop waited.

Values are checked in every configuration before it is timed. A run lasts several windows and begins after the first
ones; the pipeline's buffers are empty at its start and its end counts.
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import torch
from _common import GIB, Batches, arguments, link, report, save, synchronize, truncated_zipf, uniform

import rowferry as rf


def stamped(rows: int, row_bytes: int) -> rf.PinnedStore:
    """A pinned table whose rows begin with their own number."""
    store = rf.PinnedStore.empty((rows, row_bytes // 4), torch.int32)
    store.torch()[:, 0] = torch.arange(rows, dtype=torch.int32)
    return store


def epoch(store: rf.PinnedStore, ring: list[Any], batches: int, **settings: Any) -> dict[str, Any]:
    """One epoch, timed from ``iter()`` to the last batch: nothing fetched before the clock starts is counted."""
    rows = len(ring[0])
    with rf.Pipeline(store, batch_sampler=Batches(ring, batches), device="cuda", **settings) as pipe:
        for number, batch in enumerate(pipe):  # checked, and warm
            if number % 16 == 0 and not torch.equal(batch.data[:, 0].long(), batch.index):
                raise AssertionError(f"batch {number} holds rows that were not asked for")
            if number == 40:
                break
        del batch
        synchronize()
        start = time.perf_counter()
        for _batch in pipe:
            pass
        synchronize()
        seconds = time.perf_counter() - start
        stats = pipe.stats()
    return {"gb_s": batches * rows * store.row_nbytes / seconds / 1e9, "window": stats.batches_in_window, "mover": stats.mover}


def measure(
    name: str, store: rf.PinnedStore, ring: list[Any], batches: int, runs: int, rate: float, **settings: Any
) -> dict[str, Any]:
    """The median of ``runs`` epochs."""
    found = [epoch(store, ring, batches, **settings) for _ in range(runs)]
    best = sorted(run["gb_s"] for run in found)
    median = statistics.median(best)
    return report(
        {
            "work": name,
            "share_of_link": median / rate,
            "gb_s": median,
            "lowest": best[0],
            "highest": best[-1],
            "window": found[-1]["window"],
            "mover": found[-1]["mover"],
            **{key: str(value) for key, value in settings.items()},
        }
    )


def first_batch(runs: int) -> dict[str, Any]:
    """Milliseconds from ``iter()`` to the first batch, shuffled over a billion rows, and the memory it took."""
    table = rf.PinnedStore.empty((1 << 30, 4), torch.uint8)
    with rf.Pipeline(table, batch_size=4096, shuffle=True, device="cuda") as pipe:
        taken = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(runs):
            synchronize()
            start = time.perf_counter()
            batch = next(iter(pipe))
            synchronize()
            taken.append(1e3 * (time.perf_counter() - start))
            del batch
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return report(
        {
            "work": "first batch of 2**30 shuffled rows",
            "ms": statistics.median(taken),
            "highest": max(taken),
            "host_mb": grown / 1e6,
        }
    )


def main() -> None:
    options = arguments(__doc__ or "")
    size = int(options.rows_gib * GIB)
    results = [first_batch(options.runs)]
    rates = link()
    rate = rates["to_device"]
    print(f"link: {rates}", flush=True)
    for row_bytes, batch, batches in ((512, 131_072, 300), (512, 4_096, 6_000), (128, 131_072, 600), (2_048, 32_768, 300)):
        rows = size // row_bytes
        store = stamped(rows, row_bytes)
        ring = uniform(rows, batch, max(64, min(1024, (8 << 20) // batch)))
        results.append(measure(f"{batch} x {row_bytes} B, uniform", store, ring, batches, options.runs, rate))
        if (row_bytes, batch) == (512, 131_072):
            results.append(measure(f"{batch} x {row_bytes} B, copy", store, ring, 100, options.runs, rate, mover="copy"))
            zipf = truncated_zipf(rows, batch, 256)
            results.append(measure(f"{batch} x {row_bytes} B, Zipf 1.05", store, zipf, 600, options.runs, rate))
        store.close()
        del store
    save("reading", options, results, link=rates, seed=0, table_bytes=size)


if __name__ == "__main__":
    main()
