"""What every benchmark shares: the machine, the link measured in the same run, index batches, and the result file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import rowferry as rf

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30


class Batches:
    """``count`` index batches, drawn anew from ``ring`` in turn: an array-yielding batch sampler that costs nothing."""

    def __init__(self, ring: list[NDArray[np.int64]], count: int) -> None:
        self.ring, self.count = ring, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self.ring[number % len(self.ring)] for number in range(self.count))


def uniform(rows: int, batch: int, distinct: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """``distinct`` batches of uniform random rows."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, rows, batch) for _ in range(distinct)]


def truncated_zipf(rows: int, batch: int, distinct: int, exponent: float = 1.05, seed: int = 0) -> list[NDArray[np.int64]]:
    """P(k) proportional to k**-exponent for k = 1..rows, ranks shuffled over the rows (by a multiplication modulo rows)."""
    rng = np.random.default_rng(seed)
    factor = 2_654_435_761
    while np.gcd(factor, rows) != 1:
        factor += 2
    batches = []
    for _ in range(distinct):
        u = rng.random(batch)
        rank = ((rows ** (1 - exponent) - 1) * u + 1) ** (1 / (1 - exponent))
        batches.append((np.clip(rank.astype(np.int64) - 1, 0, rows - 1) * factor) % rows)
    return batches


def link(gib: int = 1, runs: int = 5) -> dict[str, float]:
    """GB/s of one large pinned copy each way, the median of ``runs``."""
    host = torch.empty(gib * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")

    def rate(out: torch.Tensor, source: torch.Tensor) -> float:
        seconds = timed(lambda: out.copy_(source, non_blocking=True), runs + 1)[1:]
        return gib * GIB / statistics.median(seconds) / 1e9

    return {"to_device": rate(device, host), "to_host": rate(host, device)}


def timed(fn: Callable[[], Any], runs: int) -> list[float]:
    """Seconds of each of ``runs`` calls, the device idle before and after."""
    seconds = []
    for _ in range(runs):
        synchronize()
        start = time.perf_counter()
        fn()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, Any]:
    """Where and with what this ran."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "rowferry": rf.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
    }
    if torch.cuda.is_available():
        import cupy
        import pynvml

        pynvml.nvmlInit()
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cupy": cupy.__version__,
        }
    return facts


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="ascii") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def arguments(description: str) -> argparse.Namespace:
    """``--out FOLDER`` and ``--runs N``, the same for all."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--runs", type=int, default=5, help="runs a figure; medians are reported")
    parser.add_argument("--rows-gib", type=float, default=16, help="size of the table")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where disk benchmarks put their files")
    return parser.parse_args()


def save(name: str, options: argparse.Namespace, results: list[dict[str, Any]], **more: Any) -> None:
    """Write ``name.json`` and print the ratios."""
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/{name}.py --runs {options.runs} --rows-gib {options.rows_gib:g}"
    record = {"benchmark": name, "command": command, "machine": machine(), **more, "results": results}
    (options.out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")


def report(result: dict[str, Any]) -> dict[str, Any]:
    """Print one result on one line, and give it back."""
    print(
        "  ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in result.items()),
        flush=True,
    )
    return result
