"""Files larger than the memory that a process may use: an epoch passes, and the process does not grow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rowferry as rf

MIB = 1 << 20
READER = """
import os, sys
from pathlib import Path
import numpy as np, torch
import rowferry as rf

path, group, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(0)

def held():
    status = Path("/proc/self/status").read_text()
    return sum(int(status.split(name)[1].split()[0]) for name in ("RssAnon:", "RssFile:")) * 1024

def epoch(writable):
    mode = "r+" if writable else "r"
    with rf.ZarrStore(path, mode, cache_bytes=16 << 20) if path.endswith(".zarr") else rf.open_store(path, mode) as store:
        batches = np.array_split(rng.permutation(rows), max(rows // 1024, 1))
        with rf.Pipeline(store, batch_sampler=batches, device="cpu", staging_bytes=16 << 20, writable=writable) as pipe:
            sizes = []
            for batch in pipe:
                if writable:
                    assert bool((batch.values[:, 0].long() == batch.rows).all())
                    batch.write_back()
                else:
                    assert bool((batch.data[:, 0].long() == batch.index).all())
                sizes.append(held())
            quarter = max(len(sizes) // 4, 1)
            print(pipe.stats().mover, max(sizes[quarter:]) - max(sizes[:quarter]))

(group / "cgroup.procs").write_text(str(os.getpid()))  # what it uses from here on counts
epoch(writable=False)
if sys.argv[4] == "write":
    epoch(writable=True)
"""


def drop_pages(path: Path) -> None:
    """Nothing of a file, or of the files in a folder, is in memory any more."""
    for each in path.rglob("*") if path.is_dir() else (path,):
        if each.is_file():
            fd = os.open(each, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def check(path: Path, group: Path, rows: int, *, write: bool, timeout: float, **layout: Any) -> None:
    with rf.create_store(path, (rows, 1024), torch.float32, **layout) as store:
        noise = torch.rand(16_384, 1024)  # a shard, which is replaced whole
        for start in range(0, rows, len(noise)):
            piece = noise[: min(len(noise), rows - start)]
            piece[:, 0] = torch.arange(start, start + len(piece))
            store.scatter(range(start, start + len(piece)), piece)
        store.flush(sync=True)
    drop_pages(path)
    words = [sys.executable, "-c", READER, str(path), str(group), str(rows), "write" if write else "read"]
    where = os.environ | {"PYTHONPATH": str(Path(rf.__file__).parents[1])}
    said = subprocess.run(words, env=where, capture_output=True, text=True, timeout=timeout, check=False)
    shutil.rmtree(path) if path.is_dir() else path.unlink()  # a long test's fills the disk
    assert said.returncode == 0, said.stderr
    for line in said.stdout.splitlines():
        mover, grown = line.split()
        assert mover == "copy"
        assert int(grown) < 100 * MIB, "the process grew with the file"


@pytest.mark.parametrize("memory_group", [120], indirect=True, ids="{}MiB".format)
def test_a_file_larger_than_memory_is_read_and_written_in_little(tmp_path: Path, memory_group: Path) -> None:
    check(tmp_path / "x.npy", memory_group, 51_200, write=True, timeout=100)  # 200 MiB


@pytest.mark.parametrize("layout", [{"chunks": 256, "shards": False}, {"chunks": 4, "compressor": "zstd"}], ids=str)
@pytest.mark.parametrize("memory_group", [120], indirect=True, ids="{}MiB".format)
def test_a_zarr_larger_than_memory_is_read_in_little(tmp_path: Path, memory_group: Path, layout: dict[str, Any]) -> None:
    check(tmp_path / "x.zarr", memory_group, 51_200, write=False, timeout=100, **layout)


@pytest.mark.long
@pytest.mark.parametrize("name", ["x.npy", "x.zarr"])
@pytest.mark.parametrize("memory_group", [2048], indirect=True, ids="{}MiB".format)
def test_twenty_gigabytes_are_read_in_two(tmp_path: Path, memory_group: Path, name: str) -> None:
    check(tmp_path / name, memory_group, 5_000_000, write=False, timeout=3600)
