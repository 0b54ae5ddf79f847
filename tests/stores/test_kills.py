"""SIGKILL at random moments of a write-back loop: what the files hold when they are opened again."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import rowferry
from rowferry.stores import create_store, open_store

PROGRAM = Path(__file__).with_name("killed_writer.py")
ROWS, WIDTH = 3000, 130  # rows of 1,040 bytes: many of them lie in two pages
RUNS = 20


def program() -> Any:
    spec = importlib.util.spec_from_file_location("killed_writer", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = program()


ZARR_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
from killed_writer import rows_of
from rowferry.stores import open_store
step, rows = int(sys.argv[2]), int(sys.argv[3])
with open_store(sys.argv[4], "r+") as store:
    print("ready", flush=True)
    while True:
        step += 1
        chosen = rows_of(step, rows)
        store.scatter(chosen, torch.full((len(chosen), *store.row_shape), step))
"""


def run_and_kill(delay: float, durability: str, first_step: int, *paths: Path) -> None:
    """Start the writer and kill it ``delay`` seconds after its first write."""
    with open_store(paths[0]) as store:
        offset = store.header.offset  # type: ignore[attr-defined]
    numbers = (offset, 8 * WIDTH, ROWS, first_step)
    kill([str(PROGRAM), durability, *map(str, numbers), *map(str, paths)], delay)


def kill(words: list[str], delay: float) -> None:
    """Start a Python program and kill it ``delay`` seconds after it is ready."""
    command, where = [sys.executable, *words], os.environ | {"PYTHONPATH": str(Path(rowferry.__file__).parents[1])}
    with subprocess.Popen(command, env=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            pytest.fail(process.stderr.read())
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        else:
            pytest.fail(process.stderr.read())


def held(path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """What each row holds; every element of a row must be the same."""
    with open_store(path) as store:
        rows = store.gather(slice(None))
    assert bool((rows == rows[:, :1]).all()), "a row is half old and half new"
    return rows[:, 0].numpy()


def require_written(found: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """Each row holds a step that wrote it, or nothing yet."""
    for step in np.unique(found[found > 0]).tolist():
        assert np.isin(np.flatnonzero(found == step), WRITER.rows_of(step, len(found))).all()


def check_zarr(tmp_path: Path, runs: int, shards: int | Literal[False]) -> None:
    path, rows = tmp_path / "x.zarr", 300
    create_store(path, (rows, WIDTH), torch.int64, chunks=10, shards=shards).close()
    for run, delay in enumerate(np.random.default_rng(2).uniform(0, 0.3, runs).tolist()):
        kill(["-c", ZARR_WRITER, str(PROGRAM.parent), str(run * 1_000_000), str(rows), str(path)], delay)
        require_written(held(path))


def check_flush(tmp_path: Path, runs: int) -> None:
    path = tmp_path / "x.npy"
    create_store(path, (ROWS, WIDTH), torch.int64).close()
    delays = np.random.default_rng(0).uniform(0, 0.05, runs)
    for run, delay in enumerate(delays.tolist()):
        run_and_kill(delay, "flush", run * 1_000_000, path)
        require_written(held(path))
        assert os.listdir(tmp_path) == [path.name]


def check_atomic(tmp_path: Path, runs: int) -> None:
    paths = [tmp_path / "w.npy", tmp_path / "m.npy"]
    for path in paths:
        create_store(path, (ROWS, WIDTH), torch.int64).close()
    expected, done = np.zeros(ROWS, np.int64), 0
    for delay in np.random.default_rng(1).uniform(0, 0.2, runs).tolist():
        run_and_kill(delay, "atomic", 0, *paths)
        found = [held(path) for path in paths]
        with open_store(paths[1], "r+", durability="atomic") as store:
            state = store.committed_state  # type: ignore[attr-defined]
        committed = state["step"] if state else 0
        assert committed >= done
        for step in range(done + 1, committed + 1):
            expected[WRITER.rows_of(step, ROWS)] = step
        done = committed
        for each in found:
            assert np.array_equal(each, expected)
    assert done > 0


def test_after_a_kill_each_row_is_old_or_new(tmp_path: Path) -> None:
    check_flush(tmp_path, RUNS)


def test_after_a_kill_atomic_files_are_those_of_one_completed_flush(tmp_path: Path) -> None:
    check_atomic(tmp_path, RUNS)


@pytest.mark.parametrize("shards", [False, 50])
def test_after_a_kill_each_chunk_of_a_zarr_is_old_or_new(tmp_path: Path, shards: int | Literal[False]) -> None:
    check_zarr(tmp_path, 3, shards)


@pytest.mark.long
@pytest.mark.parametrize("shards", [False, 50])
def test_after_two_hundred_kills_each_chunk_of_a_zarr_is_old_or_new(tmp_path: Path, shards: int | Literal[False]) -> None:
    check_zarr(tmp_path, 10 * RUNS, shards)


@pytest.mark.long
def test_after_two_hundred_kills_each_row_is_old_or_new(tmp_path: Path) -> None:
    check_flush(tmp_path, 10 * RUNS)


@pytest.mark.long
def test_after_two_hundred_kills_atomic_files_are_those_of_one_completed_flush(tmp_path: Path) -> None:
    check_atomic(tmp_path, 10 * RUNS)
