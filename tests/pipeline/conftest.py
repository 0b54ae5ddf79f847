"""Shared by the tests of the pipeline: tables whose rows tell their number, and the ways that rows may cross."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline, RowTable
from rowferry.stores import ArrayStore, Store

WINDOWED: dict[str, dict[str, Any]] = {
    "copy": {"mover": "copy", "lookahead": 4, "depth": 2},
    "one slot": {"mover": "copy", "lookahead": 16, "depth": 1},
    "deep": {"mover": "copy", "lookahead": 2, "depth": 4},
    "inside next": {"mover": "copy", "lookahead": 0},
}
WAYS: dict[str, dict[str, Any]] = {"local": {"mover": "local"}, **WINDOWED}
STAGING = 1 << 18  # bytes; small enough that windows end, large enough for every test's batch

MakePipeline = Callable[..., Pipeline]


@pytest.fixture
def numbered() -> Callable[..., Tensor]:
    """``numbered(n, width)``: float32 rows, row r holding 100 r, 100 r + 1, ..."""

    def make(n: int, width: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.arange(n)[:, None] * 100 + torch.arange(width)).to(dtype)

    return make


def _maker(keywords: dict[str, Any]) -> MakePipeline:
    def make(source: Any, **more: Any) -> Pipeline:
        return Pipeline(source, **{"device": "cpu", "staging_bytes": STAGING, **keywords, **more})

    return make


@pytest.fixture(params=WAYS)
def pipeline(request: pytest.FixtureRequest) -> MakePipeline:
    """``Pipeline`` on the CPU, once for each way that rows may cross. For stores in memory."""
    return _maker(WAYS[request.param])


@pytest.fixture(params=WINDOWED)
def windowed(request: pytest.FixtureRequest) -> MakePipeline:
    """``Pipeline`` on the CPU with windows, once for each shape of them. For any store."""
    return _maker(WINDOWED[request.param])


@pytest.fixture
def ahead() -> MakePipeline:
    """``Pipeline`` on the CPU with a producer's thread, two slots of four batches. For any store."""
    return _maker(WINDOWED["copy"])


@pytest.fixture
def store_of(numbered: Callable[..., Tensor]) -> Callable[..., Store]:
    """``store_of(n, width)``: an ``ArrayStore`` of numbered rows."""

    def make(n: int, width: int = 3, **keywords: Any) -> Store:
        return ArrayStore(numbered(n, width), **keywords)

    return make


@pytest.fixture(params=["local", "copy", "inside next"])
def moving(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of ``RowTable.batches``, once for each way that rows may cross."""
    return {"staging_bytes": STAGING, **WAYS[request.param]}


@pytest.fixture
def table(numbered: Callable[..., Tensor]) -> Callable[..., RowTable]:
    """``table(optimizer, settings, ...)``: a RowTable over 20 numbered rows of 3, on the CPU; by SGD at 0.5."""

    def make(optimizer: Any = torch.optim.SGD, settings: Any = None, **more: Any) -> RowTable:
        settings = {"lr": 0.5} if settings is None and optimizer is torch.optim.SGD else settings
        return RowTable(numbered(20), optimizer, settings, **{"device": "cpu", **more})

    return make


@pytest.fixture
def quiet() -> Iterator[None]:
    """Failing stores and broken runs are logged thousands of times; nobody reads it."""
    logger = logging.getLogger("rowferry")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.fixture
def memory_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group whose processes may use little memory, page cache and all: as many MiB as the test says."""
    limit = request.param * (1 << 20)
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
