"""Files larger than the memory that a process may use: an epoch passes, and the process does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    with rf.open_store(path, "r+" if writable else "r") as store:
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
            print(pipe.stats().mover, max(sizes) - sizes[len(sizes) // 4])

(group / "cgroup.procs").write_text(str(os.getpid()))  # what it uses from here on counts
epoch(writable=False)
if sys.argv[4] == "write":
    epoch(writable=True)
"""


@pytest.fixture
def memory_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group whose processes may use little memory, page cache and all: as many MiB as the test says."""
    limit = request.param * MIB
    lines = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in lines:
        parent, name = Path("/sys/fs/cgroup/memory" + lines["memory"]), "memory.limit_in_bytes"
    else:
        parent, name = Path("/sys/fs/cgroup" + lines.get("", "/")), "memory.max"
    group = parent / f"rowferry-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError:
        pytest.skip("this process may not make a control group that limits memory")
    yield group
    group.rmdir()


def check(folder: Path, group: Path, rows: int, *, write: bool, timeout: float) -> None:
    path = folder / "x.npy"
    with rf.create_store(path, (rows, 1024), torch.float32) as store:
        noise = torch.rand(4096, 1024)
        for start in range(0, rows, len(noise)):
            piece = noise[: min(len(noise), rows - start)]
            piece[:, 0] = torch.arange(start, start + len(piece))
            store.scatter(range(start, start + len(piece)), piece)
        store.flush(sync=True)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    words = [sys.executable, "-c", READER, str(path), str(group), str(rows), "write" if write else "read"]
    where = os.environ | {"PYTHONPATH": str(Path(rf.__file__).parents[1])}
    said = subprocess.run(words, env=where, capture_output=True, text=True, timeout=timeout, check=False)
    assert said.returncode == 0, said.stderr
    for line in said.stdout.splitlines():
        mover, grown = line.split()
        assert mover == "copy"
        assert int(grown) < 100 * MIB, "the process grew with the file"


@pytest.mark.parametrize("memory_group", [120], indirect=True, ids="{}MiB".format)
def test_a_file_larger_than_memory_is_read_and_written_in_little(tmp_path: Path, memory_group: Path) -> None:
    check(tmp_path, memory_group, 51_200, write=True, timeout=100)  # 200 MiB


@pytest.mark.long
@pytest.mark.parametrize("memory_group", [2048], indirect=True, ids="{}MiB".format)
def test_twenty_gigabytes_are_read_in_two(tmp_path: Path, memory_group: Path) -> None:
    check(tmp_path, memory_group, 5_000_000, write=False, timeout=3600)
