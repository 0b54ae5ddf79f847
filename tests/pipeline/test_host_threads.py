"""Host threads gather side by side: all of them from memory, few from a disk that few keep busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rowferry as rf
from rowferry.pipeline import _copy, _engine

ROWS, BATCH = 400, 40
WINDOWS = ROWS // BATCH


def threads_asked_for(monkeypatch: pytest.MonkeyPatch, path: Path, threads: int, from_disk: list[bool]) -> list[int]:
    """How many threads each window's pieces were spread over, at most; ``from_disk`` is what the store says before each."""
    asked: list[int] = []
    said, spread = iter(from_disk), _engine.Threads.spread

    def watched(host: _engine.Threads, fn: Callable[[Any], None], parts: Iterable[Any], *, most: int) -> None:
        asked.append(most)
        spread(host, fn, parts, most=most)

    monkeypatch.setattr(_engine.Threads, "spread", watched)
    monkeypatch.setattr(rf.MemmapStore, "from_disk", lambda _: next(said))
    with rf.Pipeline(path, batch_size=BATCH, device="cpu", mover="copy", threads=threads, lookahead=1) as pipe:
        assert np.concatenate([batch.data[:, 0].numpy() for batch in pipe]).tolist() == list(range(ROWS))
    return asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, axis=1))
    return tmp_path / "rows.npy"


@pytest.mark.parametrize(("threads", "few"), [(8, _copy.FEW_THREADS), (3, 3)])
def test_few_threads_read_while_rows_come_from_a_disk(
    monkeypatch: pytest.MonkeyPatch, path: Path, threads: int, few: int
) -> None:
    asked = threads_asked_for(monkeypatch, path, threads, [False, True, True, False, *[True] * (WINDOWS - 4)])
    assert asked == [threads, few, few, threads, *[few] * (WINDOWS - 4)]
