"""How long page-locked memory takes to be ready: a ``PinnedStore``, beside torch and the driver's own allocator; and a
.npy file that is in the page cache, locked where it lies.

Ways take turns, run after run: the first run of each also pays for memory that the machine has not handed out before.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import GIB, arguments, report, save

import rowferry as rf

ROW_BYTES = 512
FILE_SHARE = 4  # the file is so many times smaller than the table
Way = Callable[[int], tuple[torch.Tensor, Callable[[], None]]]
"""Bytes -> page-locked memory, and what frees it once the tensor has been dropped."""


def pinned_store(nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """rowferry."""
    store = rf.PinnedStore.empty((nbytes // ROW_BYTES, ROW_BYTES), torch.uint8)
    return store.torch(), store.close


def torch_pinned(nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """``torch.empty(..., pin_memory=True)``, whose allocator keeps freed blocks until it is told."""
    return torch.empty((nbytes // ROW_BYTES, ROW_BYTES), dtype=torch.uint8, pin_memory=True), torch._C._host_emptyCache


def driver_pinned(nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """``cudaHostAlloc``, by CuPy."""
    import cupy

    pointer = cupy.cuda.runtime.hostAlloc(nbytes, 0)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))
    return torch.from_numpy(array).view(-1, ROW_BYTES), lambda: cupy.cuda.runtime.freeHost(pointer)


OURS = "PinnedStore.empty"
SLOW_RUNS = 2  # of the others, which take 7 seconds or more
WAYS: dict[str, Way] = {
    OURS: pinned_store,
    "torch.empty(pin_memory=True)": torch_pinned,
    "cudaHostAlloc": driver_pinned,
}


def ready(way: Way, nbytes: int) -> float:
    """Seconds until rows at both ends have crossed to the device and back."""
    expected = torch.arange(ROW_BYTES).to(torch.uint8)
    start = time.perf_counter()
    memory, free = way(nbytes)
    seconds = time.perf_counter() - start
    if not memory.is_pinned():
        raise AssertionError("the memory is not page-locked")
    for row in (0, -1):
        memory[row] = expected
        if not torch.equal(memory[row].cuda().cpu(), expected):
            raise AssertionError("a row did not cross")
    del memory
    free()
    return seconds


def locked_file(folder: Path, nbytes: int, runs: int) -> list[float]:
    """Seconds until a file in the page cache is locked where it lies."""
    path = folder / "rows.npy"
    rf.create_store(path, (nbytes // ROW_BYTES, ROW_BYTES), torch.uint8, fill=7).close()
    found = []
    with rf.MemmapStore(path) as store:
        assert store.page_cache is not None
        for start in range(0, len(store), 1 << 20):
            store.gather(range(start, min(start + (1 << 20), len(store))))  # into the page cache
        for _ in range(runs):
            begun = time.perf_counter()
            memory = store.page_cache.lock()
            found.append(time.perf_counter() - begun)
            if not (memory.is_pinned() and bool((memory[-1].cuda() == 7).all())):
                raise AssertionError("the file is not locked")
            del memory
    return found


def figures(work: str, nbytes: int, seconds: list[float]) -> dict[str, Any]:
    """The median, and the first run beside it."""
    median = statistics.median(seconds)
    spread = {"runs": len(seconds), "lowest": min(seconds), "highest": max(seconds), "first": seconds[0]}
    return {"work": work, "gib": nbytes / GIB, "seconds": median, **spread, "gib_s": nbytes / GIB / median}


def main() -> None:
    options = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        raise SystemExit("page-locking needs a GPU")
    torch.zeros(1, device="cuda")  # a context is no part of it
    nbytes = int(options.rows_gib * GIB) // ROW_BYTES * ROW_BYTES
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for run in range(options.runs):
        for name, way in WAYS.items():
            if run < SLOW_RUNS or name == OURS:
                seconds[name].append(ready(way, nbytes))
    results = [report(figures(name, nbytes, found)) for name, found in seconds.items()]
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        size = nbytes // FILE_SHARE // ROW_BYTES * ROW_BYTES
        found = locked_file(Path(folder), size, options.runs)
    results.append(report(figures("a file in the page cache", size, found)))
    save("pinning", options, results)


if __name__ == "__main__":
    main()
