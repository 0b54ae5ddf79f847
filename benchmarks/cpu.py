"""Without a GPU: an array in memory through the iterator, against ``index_select`` in a plain loop."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from _common import arguments, report, save

import rowferry as rf
from rowferry._bench.workloads import Batches, uniform


def plain(table: torch.Tensor, batches: Batches) -> float:
    start = time.perf_counter()
    for index in batches:
        rows = table.index_select(0, torch.from_numpy(index))  # held until the next, as a loop holds its batch
        del index
    del rows
    return time.perf_counter() - start


def ferried(table: torch.Tensor, batches: Batches) -> float:
    with rf.Pipeline(table, batch_sampler=batches, device="cpu") as pipe:
        start = time.perf_counter()
        for _batch in pipe:
            pass
        return time.perf_counter() - start


def main() -> None:
    options = arguments(__doc__ or "")
    table = torch.randn(10_000 if options.smoke else 1_000_000, 128)
    batches = Batches(uniform(len(table), 4096, 64), options.batches(1_000))
    with rf.Pipeline(table, batch_sampler=batches, device="cpu") as pipe:
        for index, batch in zip(batches, pipe, strict=True):
            if not torch.equal(batch.data, table[torch.from_numpy(index)]):
                raise AssertionError("wrong rows")
    ratios: list[Any] = []
    for _ in range(options.runs):
        alone, through = plain(table, batches), ferried(table, batches)
        ratios.append((through / alone, alone, through))
    middle = sorted(ratios)[len(ratios) // 2]
    results = [
        report(
            {
                "work": "4096 x 128 float32 on the CPU",
                "ratio_to_index_select": statistics.median(ratio for ratio, _, _ in ratios),
                "lowest": min(ratios)[0],
                "highest": max(ratios)[0],
                "us_a_batch": 1e6 * middle[2] / len(batches),
                "us_index_select": 1e6 * middle[1] / len(batches),
            }
        )
    ]
    save("cpu", options, results, seed=0, threads=torch.get_num_threads(), table_bytes=int(np.prod(table.shape)) * 4)


if __name__ == "__main__":
    main()
