"""Random rows of a .npy changed and written back through the iterator: what ``durability="atomic"`` costs.

Plain write-back is ``durability="flush"`` with ``flush(sync=True)``, so that both are on the disk at the same moments. Rows are
checked at the end of each run. Bytes are those that the process had the system write: whole pages of the file, and the
undo file.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import GIB, arguments, report, save
from _disk import make_warm, stamped_file

import rowferry as rf
from rowferry._bench.workloads import Batches

BATCH, BATCHES, FLUSH_EVERY, MOST_GIB = 16_384, 32, 8, 2.0


def bytes_written() -> int:
    """Bytes that this process had the system write so far."""
    return int(Path("/proc/self/io").read_text().split("\nwrite_bytes: ")[1].split()[0])


def write_back(path: Path, rows: int, durability: Any, seed: int) -> dict[str, float]:
    """Seconds and bytes of one epoch that negates rows."""
    rng = np.random.default_rng(seed)
    ring = [rng.integers(0, rows, BATCH) for _ in range(BATCHES)]
    times = np.zeros(rows, np.int64)
    for index in ring:
        times[np.unique(index)] += 1
    make_warm(path)
    with rf.open_store(path, "r+", durability=durability) as store:
        before = torch.sign(store.gather(slice(None))[:, 255])
        with rf.Pipeline(store, batch_sampler=Batches(ring, BATCHES), device="cpu", writable=True) as pipe:
            start, written = time.perf_counter(), bytes_written()
            for number, batch in enumerate(pipe, 1):
                batch.values.neg_()
                batch.write_back()
                if number % FLUSH_EVERY == 0:
                    pipe.flush(sync=True)
            seconds, written = time.perf_counter() - start, bytes_written() - written
        changed = torch.from_numpy(times % 2 == 1)
        if not torch.equal(torch.sign(store.gather(slice(None))[:, 255]) * before < 0, changed):
            raise AssertionError("rows that were not written")
    return {"seconds": seconds, "bytes": float(written)}


def main() -> None:
    options = arguments(__doc__ or "")
    rows = int(min(options.rows_gib, MOST_GIB) * GIB) // 1024
    path = options.folder / "rowferry-disk-writing.npy"
    found: dict[str, list[dict[str, float]]] = {"flush": [], "atomic": []}
    try:
        stamped_file(path, rows, 256)
        for run in range(options.runs):
            for durability, results in found.items():
                results.append(write_back(path, rows, durability, run))
    finally:
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink()
    pairs = list(zip(found["atomic"], found["flush"], strict=True))
    logical = BATCH * BATCHES * 1024
    result = {
        "work": f"{BATCH} random rows of 1 KiB a batch, flushed after {FLUSH_EVERY}",
        "times_the_seconds": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
        "times_the_bytes": statistics.median(a["bytes"] / b["bytes"] for a, b in pairs),
        "lowest": min(a["seconds"] / b["seconds"] for a, b in pairs),
        "highest": max(a["seconds"] / b["seconds"] for a, b in pairs),
        "mb_s_flush": logical / statistics.median(each["seconds"] for each in found["flush"]) / 1e6,
        "mb_s_atomic": logical / statistics.median(each["seconds"] for each in found["atomic"]) / 1e6,
    }
    save("disk_writing", options, [report(result)], file_bytes=rows * 1024)


if __name__ == "__main__":
    main()
