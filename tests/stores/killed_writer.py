"""A program that writes rows until it is killed. It does not import torch, so that many runs of it take no time.

    python killed_writer.py DURABILITY OFFSET ROW_NBYTES ROWS FIRST_STEP FILE...

Step ``k`` writes the rows ``rows_of(k)`` of each file, every 8 bytes of them ``k``. With "atomic" each fifth step commits the
files together, with the number of the step as their state; FIRST_STEP is then read from there.
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

STORES = Path(__file__).parents[2] / "stores"
COMMIT_EVERY = 5


def rows_of(step: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Distinct rows of a step, in order."""
    return np.unique(np.random.default_rng(step).integers(0, rows, rows // 3))


def modules() -> Any:
    """``stores/`` as a package of its own, without what its ``__init__`` imports."""
    package = types.ModuleType("without_torch")
    package.__path__ = [str(STORES)]
    sys.modules[package.__name__] = package
    return types.SimpleNamespace(
        **{name: importlib.import_module(f"without_torch.{name}") for name in ("_files", "_recovery", "_file_reads")},
        **{name: importlib.import_module(f"without_torch.{name}") for name in ("_file_writes", "_commit")},
    )


def opened(use: Any, path: Path, durability: str, offset: int, row_nbytes: int, rows: int) -> Any:
    """As a MemmapStore opens its file."""
    fd = os.open(path, os.O_RDWR)
    use._files.lock_writer(fd, path)
    use._recovery.recover(path, fd)
    mapped = mmap.mmap(fd, offset + rows * row_nbytes)
    reads = use._file_reads.FileReads(fd, offset=offset, row_nbytes=row_nbytes, mapped=mapped)
    return use._file_writes.FileWrites(
        path, fd, mapped, reads, offset=offset, row_nbytes=row_nbytes, rows=rows, durability=durability
    )


def main() -> None:
    durability, *numbers = sys.argv[1:6]
    offset, row_nbytes, rows, step = map(int, numbers)
    use = modules()
    files = [opened(use, Path(each), durability, offset, row_nbytes, rows) for each in sys.argv[6:]]
    group = None
    if durability == "atomic":
        group = use._commit.join([file.durable for file in files])
        step = group.state["step"] if group.state else 0
    assert "torch" not in sys.modules
    print("ready", flush=True)
    while True:
        step += 1
        chosen = rows_of(step, rows)
        values = np.full(len(chosen) * row_nbytes // 8, step, np.uint64).view(np.uint8)
        for file in files:
            file.scatter(chosen, values)
        if group is not None and step % COMMIT_EVERY == 0:
            group.commit({"step": step})


if __name__ == "__main__":
    main()
