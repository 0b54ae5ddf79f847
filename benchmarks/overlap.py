"""How much of the transfer a training loop hides: step time over max(compute + serve, transfer), and what a
launch-bound loop pays for the pipeline beside it.

Compute is bf16 matrix products that fill the GPU; transfer is what the same run reads without compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import GIB, Batches, arguments, link, report, save, synchronize, uniform
from reading import stamped

import rowferry as rf


def seconds_a_step(store: rf.PinnedStore, ring: list[Any], steps: int, compute: Callable[[], Any], **settings: Any) -> float:
    """Of an epoch whose every batch is followed by ``compute``; the first quarter warms up."""
    with rf.Pipeline(store, batch_sampler=Batches(ring, steps), device="cuda", **settings) as pipe:
        start = 0.0
        for number, _batch in enumerate(pipe):
            compute()
            if number == steps // 4:
                synchronize()
                start = time.perf_counter()
        synchronize()
        return (time.perf_counter() - start) / (steps - steps // 4 - 1)


def products(milliseconds: float) -> tuple[Callable[[], None], float]:
    """bf16 products that take about so long, and how long they take alone, in seconds."""
    a = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def run(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    def measured(times: int) -> float:
        run(times)
        synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run(times)
        synchronize()
        return (time.perf_counter() - start) / 20

    times = max(round(milliseconds / 1e3 / measured(1)), 1)
    return (lambda: run(times)), measured(times)


def overlap(store: rf.PinnedStore, ring: list[Any], runs: int) -> list[dict[str, Any]]:
    transfer = statistics.median(seconds_a_step(store, ring, 200, lambda: None) for _ in range(runs))
    places = torch.randint(0, 1 << 20, (131_072,), device="cuda")
    window = torch.empty(1 << 20, 128, device="cuda")
    synchronize()
    start = time.perf_counter()
    for _ in range(100):
        window.index_select(0, places)
    synchronize()
    serve = (time.perf_counter() - start) / 100
    results = []
    for ratio in (0.5, 1, 2, 4):
        compute, alone = products(1e3 * transfer * ratio)
        for settings in ({}, {"lookahead": 0}):
            steps = 120 if settings else 200
            took = statistics.median(seconds_a_step(store, ring, steps, compute, **settings) for _ in range(runs))
            bound = max(alone + serve, transfer)
            results.append(
                report(
                    {
                        "work": f"compute/transfer {ratio:g}" + (", lookahead=0" if settings else ""),
                        "step_over_bound": took / bound,
                        "ms_a_step": 1e3 * took,
                        "ms_compute": 1e3 * alone,
                        "ms_transfer": 1e3 * transfer,
                        "ms_serve": 1e3 * serve,
                    }
                )
            )
    return results


def launch_bound(store: rf.PinnedStore, ring: list[Any], runs: int, rate: float) -> dict[str, Any]:
    """Pairs of tiny kernels, one batch every k-th of them so that the link is at least 0.8 busy."""
    x = torch.zeros(64, device="cuda")
    pairs = 100

    def tiny() -> None:
        for _ in range(pairs):
            x.add_(1)
            x.mul_(1)

    def alone() -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(50):
            tiny()
        synchronize()
        return (time.perf_counter() - start) / 50

    found = []
    for _ in range(runs):
        base = statistics.median(alone() for _ in range(3))
        every = 131_072 * 512 / (0.85 * rate * 1e9) / base  # batches to iterations
        with rf.Pipeline(store, batch_sampler=Batches(ring, 300), device="cuda") as pipe:
            inside = owed = loops = 0.0
            start = 0.0
            for number, _batch in enumerate(iter(pipe)):
                if number == 60:
                    synchronize()
                    start, inside, loops = time.perf_counter(), 0.0, 0.0
                owed += every
                while owed >= 1:
                    begin = time.perf_counter()
                    tiny()
                    inside += time.perf_counter() - begin
                    owed -= 1
                    loops += 1
            synchronize()
            whole = time.perf_counter() - start
        busy = 239 * 131_072 * 512 / whole / (rate * 1e9)
        found.append({"slowdown": inside / loops / base, "link_busy": busy, "us_alone": 1e6 * base / pairs})
    middle = sorted(found, key=lambda run: run["slowdown"])[len(found) // 2]
    return report({"work": "launch-bound loop", **middle})


def main() -> None:
    options = arguments(__doc__ or "")
    rates = link()
    print(f"link: {rates}", flush=True)
    rows = int(options.rows_gib * GIB) // 512
    store = stamped(rows, 512)
    ring = uniform(rows, 131_072, 64)
    results = [*overlap(store, ring, options.runs), launch_bound(store, ring, options.runs, rates["to_device"])]
    save("overlap", options, results, link=rates, seed=0)


if __name__ == "__main__":
    main()
