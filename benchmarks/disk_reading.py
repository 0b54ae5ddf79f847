"""Random rows of a .npy on a disk: cold against fio and np.load, warm against ``index_select`` in memory.

Rows are checked in every configuration. Cold figures begin with the file's pages dropped; fio runs beside each of them, on
the same file, with the same block size and as deep as a device goes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import GIB, arguments, report, save
from _disk import DEPTH, fio_reads, make_cold, make_warm, require_stamps, sorted_rows, stamped_file

import rowferry as rf
from rowferry._bench.workloads import Batches

WINDOW, FEW, BATCH = 65_536, 8_192, 4_096
WARM_UP = 12  # windows


def seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def gather_cold(path: Path, count: int, rows: int, seed: int, **options: Any) -> float:
    """Rows a second of one window, nothing of the file in memory."""
    index, out = sorted_rows(count, rows, seed), torch.zeros(count, 256)
    make_cold(path)
    with rf.open_store(path, **options) as store:
        taken = seconds(lambda: store.gather(index, out=out))
    require_stamps(index, out)
    return count / taken


def load_cold(path: Path, count: int, rows: int, seed: int) -> float:
    """Rows a second of the usual way."""
    index = sorted_rows(count, rows, seed)
    np.random.default_rng(seed).shuffle(index)  # as batches ask for them
    make_cold(path)
    mapped = np.load(path, mmap_mode="r")
    start = time.perf_counter()
    found = mapped[index]
    taken = time.perf_counter() - start
    require_stamps(index, torch.from_numpy(found))
    return count / taken


def pipeline_cold(path: Path, rows: int, batches: int, seed: int) -> float:
    """Rows a second of random batches through the iterator on the CPU, windows and all."""
    rng = np.random.default_rng(seed)
    ring = [rng.integers(0, rows, BATCH) for _ in range(batches)]
    make_cold(path)
    with rf.Pipeline(path, batch_sampler=Batches(ring, batches), device="cpu") as pipe:
        start = time.perf_counter()
        last = None
        for batch in pipe:
            last = batch
        taken = time.perf_counter() - start
        assert last is not None
        require_stamps(ring[-1], last.data)
    return BATCH * batches / taken


def cold(path: Path, rows: int, runs: int) -> list[dict[str, Any]]:
    ways: dict[str, Callable[[int], float]] = {
        "gather": lambda seed: gather_cold(path, WINDOW, rows, seed),
        "gather, cache=drop": lambda seed: gather_cold(path, WINDOW, rows, seed, cache="drop"),
        "pipeline on the CPU": lambda seed: pipeline_cold(path, rows, 48, seed),
        "np.load(mmap_mode='r')": lambda seed: load_cold(path, FEW, rows, seed),
    }
    found: dict[str, list[float]] = {name: [] for name in (*ways, "fio", "fio, buffered")}
    for run in range(runs):
        for name, way in ways.items():
            found[name].append(way(run))
        for name, direct in (("fio", True), ("fio, buffered", False)):
            if (rate := fio_reads(path, 1024, direct=direct)) is not None:
                found[name].append(rate)
    fio, plain = found["fio"], found["np.load(mmap_mode='r')"]
    results = []
    for name, rates in found.items():
        if not rates:
            continue
        result: dict[str, Any] = {"work": f"cold 1 KiB rows, {name}", "rows_s": statistics.median(rates)}
        result |= {"lowest": min(rates), "highest": max(rates)}
        if fio:
            result["share_of_fio"] = statistics.median(a / b for a, b in zip(rates, fio, strict=True))
        result["times_np_load"] = statistics.median(a / b for a, b in zip(rates, plain, strict=True))
        results.append(report(result))
    return results


def warm(path: Path, rows: int, runs: int) -> dict[str, Any]:
    """One thread copies windows of rows from the mapped file, and from the same rows in memory."""
    make_cold(path)
    make_warm(path)  # from end to end, as most files get there: Linux then has large pages of it
    table = torch.from_numpy(np.load(path))
    threads, out = torch.get_num_threads(), torch.zeros(WINDOW, 256)
    torch.set_num_threads(1)
    ratios, rates = [], []
    with rf.open_store(path) as store:
        for seed in range(WARM_UP + runs):  # the first windows find out that all of the file is in memory
            index = sorted_rows(WINDOW, rows, seed)
            ours = seconds(lambda index=index: store.gather(index, out=out))  # type: ignore[misc]
            require_stamps(index, out)
            places = torch.from_numpy(index)
            alone = seconds(lambda places=places: torch.index_select(table, 0, places, out=out))  # type: ignore[misc]
            if seed >= WARM_UP:
                ratios.append(alone / ours)
                rates.append(WINDOW / ours)
    torch.set_num_threads(threads)
    return report(
        {
            "work": "warm 1 KiB rows, gather",
            "rows_s": statistics.median(rates),
            "share_of_index_select": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    )


def main() -> None:
    options = arguments(__doc__ or "")
    results = []
    path = options.folder / "rowferry-disk-reading.npy"
    try:
        rows = int(options.rows_gib * GIB) // 1024
        results += cold(stamped_file(path, rows, 256), rows, options.runs)
        path.unlink()
        results.append(warm(stamped_file(path, 1 << 21, 256), 1 << 21, 3 * options.runs))
    finally:
        path.unlink(missing_ok=True)
    save("disk_reading", options, results, depth=DEPTH, window=WINDOW, file_bytes=rows * 1024)


if __name__ == "__main__":
    main()
