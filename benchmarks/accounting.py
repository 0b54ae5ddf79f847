"""What the account of time costs: an epoch with it, over an epoch whose timeline does nothing; and what ``count_inf`` costs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from _common import GIB, arguments, report, save, synchronize

import rowferry as rf
from rowferry._bench.workloads import Batches, uniform
from rowferry.pipeline._timeline import Timeline

SILENT = ("start_fetch", "end_fetch", "meet", "leave", "settle", "moved", "epoch_ends")
CASES: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("131,072 rows a batch", 131_072, 300, {}),
    ("4,096 rows a batch", 4_096, 6_000, {}),
    ("4,096 rows a batch, a batch a window", 4_096, 800, {"lookahead": 1}),
    ("4,096 rows a batch, lookahead=0", 4_096, 800, {"lookahead": 0}),
)


@contextlib.contextmanager
def no_account() -> Iterator[None]:
    """Inside, no event is recorded and no time is read."""
    kept = {name: Timeline.__dict__[name] for name in (*SILENT, "phase", "blocked")}
    for name in SILENT:
        setattr(Timeline, name, lambda *given, **named: None)
    for name in ("phase", "blocked"):
        setattr(Timeline, name, lambda *given, **named: contextlib.nullcontext())
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Timeline, name, method)


def epoch(store: rf.Store, ring: list[Any], steps: int, device: str, **settings: Any) -> tuple[float, int]:
    """Seconds of an epoch after its first tenth, and its windows. One mover: trying several would be timed otherwise."""
    with rf.Pipeline(store, batch_sampler=Batches(ring, steps), device=device, mover="copy" if device == "cpu" else "zero-copy",
                     **settings) as pipe:  # fmt: skip
        start = 0.0
        for number, _batch in enumerate(pipe):
            if number == steps // 10:
                synchronize()
                start = time.perf_counter()
        synchronize()
        return time.perf_counter() - start, pipe.stats().windows


def compared(name: str, runs: int, ways: dict[str, Any]) -> dict[str, Any]:
    """Both ways in turn, each first every other time, so that a slow moment meets both; medians, and the fastest of each."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    windows = 0
    for number in range(runs):
        for way in sorted(ways, reverse=bool(number % 2)):
            seconds, windows = ways[way]()
            took[way].append(seconds)
    pairs = list(zip(took["with"], took["without"], strict=True))
    return report(
        {
            "work": name,
            "with_over_without": statistics.median(with_it / without for with_it, without in pairs),
            "fastest_with_over_fastest_without": min(took["with"]) / min(took["without"]),
            "us_a_window": 1e6 * statistics.median(with_it - without for with_it, without in pairs) / max(windows, 1),
            "windows": windows,
        }
    )


def main() -> None:
    options = arguments(__doc__ or "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = int(options.rows_gib * GIB) // 512
    store: rf.Store = rf.PinnedStore.zeros((rows, 128), torch.float32)
    results = []
    for name, batch, steps, settings in CASES:
        ring = uniform(rows, batch, 64)
        steps = steps if device == "cuda" else steps // 20

        def with_account(ring: Any = ring, steps: int = steps, settings: Any = settings) -> tuple[float, int]:
            return epoch(store, ring, steps, device, **settings)

        def without_account(ring: Any = ring, steps: int = steps, settings: Any = settings) -> tuple[float, int]:
            with no_account():
                return epoch(store, ring, steps, device, **settings)

        results.append(compared(name, options.runs, {"with": with_account, "without": without_account}))
    ring, steps = uniform(rows, 131_072, 64), 300 if device == "cuda" else 15
    ways = {
        way: lambda count=count: epoch(
            store, ring, 300 if device == "cuda" else 15, device, dtype=torch.float16, count_inf=count
        )
        for way, count in (("with", True), ("without", False))
    }
    results.append(compared("131,072 rows a batch as float16, count_inf", options.runs, ways))
    save("accounting", options, results)


if __name__ == "__main__":
    main()
