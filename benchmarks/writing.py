"""Writing rows back to a pinned table: writing only, and reading, changing and writing every row.

The store is checked after each configuration.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from _common import GIB, Batches, arguments, link, report, save, synchronize

import rowferry as rf


def distinct(rows: int, batch: int, count: int) -> list[Any]:
    """Batches of distinct rows."""
    rng = np.random.default_rng(1)
    order = rng.permutation(rows)[: batch * count]
    return [np.ascontiguousarray(order[start : start + batch]) for start in range(0, len(order), batch)]


def epoch(store: rf.PinnedStore, ring: list[Any], batches: int, *, fetch: bool, **settings: Any) -> float:
    """GB/s in total (both directions where rows are read too), from ``iter()`` to the end of ``flush()``."""
    values = torch.ones((len(ring[0]), *store.row_shape), dtype=store.dtype, device="cuda")
    with rf.Pipeline(
        store, batch_sampler=Batches(ring, batches), device="cuda", writable=True, fetch=fetch, **settings
    ) as pipe:
        seconds = 0.0
        for warm in (True, False):
            synchronize()
            start = time.perf_counter()
            for number, batch in enumerate(pipe):
                if fetch:
                    batch.values.add_(1)
                    batch.write_back()
                else:
                    batch.write_back(values)
                if warm and number == 30:
                    break
            del batch
            pipe.flush()
            synchronize()
            seconds = time.perf_counter() - start
    return batches * len(ring[0]) * store.row_nbytes * (2 if fetch else 1) / seconds / 1e9


def main() -> None:
    options = arguments(__doc__ or "")
    rows, batch, batches = int(options.rows_gib * GIB) // 512, 131_072, 200
    store = rf.PinnedStore.zeros((rows, 128), torch.float32)
    rates = link()
    print(f"link: {rates}", flush=True)
    ring = distinct(rows, batch, min(rows // batch, 200))
    results = []
    for name, fetch, rate in (
        ("writing only", False, rates["to_host"]),
        ("read and write every row", True, rates["to_device"]),
    ):
        for settings in ({}, {"depth": 3}):
            store.torch()[ring[0][:1000]] = 0
            found = sorted(epoch(store, ring, batches, fetch=fetch, **settings) for _ in range(options.runs))
            touched = store.torch()[ring[0][:1000]]
            if not bool((touched == touched[0, 0]).all()) or float(touched[0, 0]) <= 0:
                raise AssertionError("rows that were written back are not in the store")
            median = statistics.median(found)
            shown = {key: str(value) for key, value in settings.items()}
            figures = {"share_of_link": median / rate, "gb_s": median, "lowest": found[0], "highest": found[-1]}
            results.append(report({"work": name, **figures, **shown}))
    save("writing", options, results, link=rates, seed=1, rows=rows)


if __name__ == "__main__":
    main()
