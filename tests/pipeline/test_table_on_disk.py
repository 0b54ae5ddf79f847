"""Tables larger than the memory that a process may use: trained where they lie, and equal to the plain loop."""

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
WIDTH, SLICE = 1024, 4  # rows of 4 KiB; elements are trained independently, so the plain loop needs a few of each row
COLUMNS = ("weight", "exp_avg", "exp_avg_sq")

TRAINER = """
import os, sys
from pathlib import Path
import torch
import rowferry as rf

folder, suffix, group = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
steps, wanted, budget = map(int, sys.argv[4:])

def held():
    status = Path("/proc/self/status").read_text()
    return sum(int(status.split(name)[1].split()[0]) for name in ("RssAnon:", "RssFile:")) * 1024

warm = rf.RowTable(torch.zeros(4, 4), torch.optim.Adam, device="cpu")
for batch in warm.batches([[1, 2]]):  # what torch imports at a first step does not count
    batch.lookup().sin().sum().backward()
    batch.step()
(group / "cgroup.procs").write_text(str(os.getpid()))  # what it uses from here on counts
stores = {name: rf.open_store(folder / (name + suffix), "r+") for name in ("weight", "exp_avg", "exp_avg_sq")}
weights = stores.pop("weight")
table = rf.RowTable(weights, torch.optim.Adam, {"lr": 0.05}, state=stores, device="cpu")
generator = torch.Generator().manual_seed(1)
ids = [torch.randint(0, len(weights), (wanted,), generator=generator) for _ in range(steps)]
batches, sizes = table.batches(ids, staging_bytes=budget, mover="copy"), []
for batch in batches:
    batch.lookup().sin().sum().backward()
    batch.step()
    sizes.append(held())
table.flush()
batches.close()
for store in (weights, *stores.values()):
    store.close()
quarter = max(len(sizes) // 4, 1)
print(max(sizes[quarter:]) - max(sizes[:quarter]))
"""


def plain_loop(rows: int, steps: int, batch: int) -> dict[str, torch.Tensor]:
    """Read, step, write of the first elements of all rows, in memory."""
    full = {name: torch.zeros(rows, SLICE) for name in COLUMNS}
    full["weight"][:] = torch.arange(rows).unsqueeze(1) / rows
    generator, step = torch.Generator().manual_seed(1), torch.tensor(0.0)
    for _ in range(steps):
        chosen, inverse = torch.randint(0, rows, (batch,), generator=generator).unique(return_inverse=True)
        leaf = full["weight"][chosen].requires_grad_()
        optimizer = torch.optim.Adam([leaf], lr=0.05)
        optimizer.state[leaf] = {"step": step, **{name: full[name][chosen] for name in COLUMNS[1:]}}
        torch.nn.functional.embedding(inverse, leaf).sin().sum().backward()
        optimizer.step()
        full["weight"][chosen] = leaf.detach()
        for name in COLUMNS[1:]:
            full[name][chosen] = optimizer.state[leaf][name]
    return full


def check(folder: Path, suffix: str, group: Path, rows: int, *, steps: int, batch: int, **layout: Any) -> None:
    """Train in another process, in ``group``; then compare what the files hold."""
    for name in COLUMNS:
        with rf.create_store(folder / (name + suffix), (rows, WIDTH), torch.float32, **layout) as store:
            for start in range(0, rows if name == "weight" else 0, 4096):  # whole chunks
                chosen = torch.arange(start, min(start + 4096, rows))
                store.scatter(chosen, (chosen.unsqueeze(1) / rows).expand(-1, WIDTH))
            store.flush(sync=True)
    words = [sys.executable, "-c", TRAINER, str(folder), suffix, str(group), *map(str, (steps, batch, 16 * MIB))]
    where = os.environ | {"PYTHONPATH": str(Path(rf.__file__).parents[1])}
    said = subprocess.run(words, env=where, capture_output=True, text=True, check=False)
    try:
        assert said.returncode == 0, said.stderr
        assert int(said.stdout) < 64 * MIB, "the process grew with the table"
        expected = plain_loop(rows, steps, batch)
        for name in COLUMNS:
            with rf.open_store(folder / (name + suffix)) as store:
                for start in range(0, rows, 4096):
                    found, right = store.gather(slice(start, start + 4096)), expected[name][start : start + 4096]
                    # As torch computes them; the elements of a row agree, wherever vector instructions begin.
                    torch.testing.assert_close(found[:, :SLICE], right, rtol=1e-6, atol=1e-7)
                    assert torch.equal(found, found[:, :1].expand(-1, WIDTH))
    finally:
        for name in COLUMNS:
            path = folder / (name + suffix)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


LAYOUTS: dict[str, dict[str, Any]] = {".npy": {}, ".zarr": {"chunks": 64, "shards": False}}


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("memory_group", [200], indirect=True, ids="{}MiB".format)
def test_a_table_larger_than_memory_trains_in_little(tmp_path: Path, memory_group: Path, suffix: str) -> None:
    check(tmp_path, suffix, memory_group, 32_768, steps=12, batch=256, **LAYOUTS[suffix])  # 384 MiB


@pytest.mark.long
@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("memory_group", [2048], indirect=True, ids="{}MiB".format)
def test_a_table_of_six_gigabytes_trains_in_two(tmp_path: Path, memory_group: Path, suffix: str) -> None:
    check(tmp_path, suffix, memory_group, 500_000, steps=400, batch=512, **LAYOUTS[suffix])
