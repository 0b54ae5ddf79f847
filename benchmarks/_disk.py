"""What the disk benchmarks share: files with stamped rows, a cold page cache, and what fio says of the same disk."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rowferry as rf

FIO_SECONDS = 3
TRIES = 20  # a page that a processor has just handled stays for a moment
DEPTH = 256  # requests in flight of fio: as many as a device queues, so that more are no faster


def stamped_file(path: Path, rows: int, width: int, **layout: Any) -> Path:
    """A .npy or .zarr of ``(rows, width)`` float32; a row begins with its number (exact up to 2**24) and is random else.

    ``layout``: how a .zarr is cut, as ``create_store`` takes it.
    """
    noise = torch.rand(1 << 16, width)
    with rf.create_store(path, (rows, width), torch.float32, **layout) as store:
        for start in range(0, rows, len(noise)):
            piece = noise[: min(len(noise), rows - start)]
            piece[:, 0] = torch.arange(start, start + len(piece))
            store.scatter(range(start, start + len(piece)), piece)
        store.flush(sync=True)
    return path


def make_cold(path: Path) -> None:
    """Drop the file's pages from the page cache. They must be clean and mapped nowhere."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def make_all_cold(path: Path, *, strict: bool = False) -> None:
    """Drop the pages of a file, or of all files of a folder; those too that a reader of before still had mapped.

    Raises:
        RuntimeError: ``strict``, and a file is in memory all the same, so that what follows would not be cold.
    """
    gc.collect()
    left = [each for each in (path.rglob("*") if path.is_dir() else (path,)) if each.is_file()]
    for _ in range(TRIES):
        for each in left:
            make_cold(each)
        left = [each for each in left if each.stat().st_size and is_in_memory(each)]
    if left and strict:
        raise RuntimeError(f"{left[0]} is mapped or dirty, or its file system has no disk, and stays in the page cache")


def is_in_memory(path: Path) -> bool:
    """Whether the file's last page is in the page cache; nothing is read from the disk to tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return bool(os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size - 1, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def bytes_from_disk() -> int:
    """Bytes that this process had the system read from a disk so far."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def disk_busy_seconds(path: Path) -> float:
    """How long the disk that ``path`` is on has had a request to work on so far (what iostat calls utilization).

    Raises:
        RuntimeError: the file system is on no block device of its own, so that nobody counts.
    """
    device = path.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not counters.exists():
        raise RuntimeError(f"{path} is on no block device whose use the system counts; give a --folder on a disk")
    return int(counters.read_text().split()[9]) / 1e3  # io_ticks, milliseconds: Documentation/block/stat.rst of Linux


def make_warm(path: Path) -> None:
    """Read the file once from end to end."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def fio_reads(path: Path, nbytes: int, *, direct: bool = True) -> float | None:
    """Random reads of ``nbytes`` a second by fio, ``DEPTH`` in flight from one thread; None where there is no fio."""
    fio = shutil.which("fio")
    if fio is None:
        return None
    make_cold(path)
    options = {
        "name": "rows",
        "filename": str(path),
        "rw": "randread",
        "bs": nbytes,
        "iodepth": DEPTH,
        "ioengine": "io_uring",
        "direct": int(direct),
        "norandommap": 1,
        "randrepeat": 0,
        "time_based": 1,
        "runtime": FIO_SECONDS,
        "output-format": "json",
    }
    command = [fio, "--readonly", *(f"--{key}={value}" for key, value in options.items())]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(said[said.index("{\n") :])["jobs"][0]["read"]["iops"])


def sorted_rows(count: int, rows: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Distinct random rows in order, as a window has them."""
    rng = np.random.default_rng(seed)
    return np.unique(rng.integers(0, rows, count + count // 8))[:count] if count * 16 < rows else np.arange(count)


def require_stamps(rows: np.ndarray[tuple[int], np.dtype[np.int64]], found: torch.Tensor) -> None:
    """Raise where a row is not the one asked for."""
    if not torch.equal(found[:, 0].long(), torch.from_numpy(rows)):
        raise AssertionError("rows that were not asked for")
