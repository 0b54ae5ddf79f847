"""NVTX ranges: nothing unless the environment asks, and then by the package nvtx."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline._ranges import VARIABLE, ranges_wanted

Make = Callable[..., Pipeline]


def test_by_default_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ranges_wanted() is None
    monkeypatch.setenv(VARIABLE, "0")
    assert ranges_wanted() is None


def test_what_is_done_is_in_a_range_that_ends(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    open_now: list[str] = []
    seen: set[str] = set()

    @contextmanager
    def ranges(name: str) -> Iterator[None]:
        open_now.append(name)
        seen.add(name)
        try:
            yield
        finally:
            open_now.remove(name)

    with windowed(numbered(8), batch_size=2, writable=True) as pipe:
        assert pipe._parts is not None
        pipe._parts.timeline._ranges = ranges
        for batch in pipe:
            batch.write_back()
    assert seen == {"sampler", "plan", "slot", "fetch", "next", "drain", "write_back"}
    assert open_now == []


def test_with_the_variable_set_a_pipeline_runs_with_nvtx(
    ahead: Make, numbered: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvtx")
    monkeypatch.setenv(VARIABLE, "1")
    with ahead(numbered(8), batch_size=2) as pipe:
        assert torch.equal(torch.cat([batch.data for batch in pipe]), numbered(8))


def test_without_the_package_the_extra_is_named(
    ahead: Make, numbered: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ImportError, match=r"pip install 'rowferry\[nvtx\]'"):
        ahead(numbered(8), batch_size=2)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="ROWFERRY_NVTX is 'yes'; set it to 1"):
        ranges_wanted()
