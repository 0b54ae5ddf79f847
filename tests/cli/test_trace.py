"""``rowferry trace`` draws what ``pipe.trace`` wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import Result

import rowferry as rf
from rowferry.pipeline._passage import CAUSES


@pytest.fixture
def trace(tmp_path: Path, rows: NDArray[np.float32]) -> Path:
    path = tmp_path / "t.json"
    with rf.Pipeline(rows, batch_size=50, device="cpu", mover="copy", writable=True, staging_bytes=1 << 20) as pipe:
        pipe.trace(path)
        for batch in pipe:
            batch.write_back()
    return path


@pytest.mark.parametrize(("name", "start"), [("t.png", b"\x89PNG"), ("t.svg", b"<?xml")])
def test_the_picture_is_of_the_kind_that_its_name_says(
    ask: Callable[..., dict[str, Any]], trace: Path, name: str, start: bytes
) -> None:
    said = ask("trace", trace, "--out", trace.with_name(name))
    assert trace.with_name(name).read_bytes().startswith(start)
    assert said["picture"] == str(trace.with_name(name))
    assert said["spans"] > 20
    assert set(said["waited_for"]) <= set(CAUSES)
    assert sum(said["waited_for"].values()) < said["seconds"]


def test_it_lies_beside_the_trace_if_no_name_is_given(run: Callable[..., Result], trace: Path) -> None:
    result = run("trace", trace)
    assert result.exit_code == 0
    assert str(trace.with_suffix(".png")) in result.stdout
    assert trace.with_suffix(".png").exists()


def test_tracks_and_work_are_named_in_the_picture(run: Callable[..., Result], trace: Path) -> None:
    assert run("trace", trace, "--out", trace.with_suffix(".svg")).exit_code == 0
    text = trace.with_suffix(".svg").read_text()
    for label in ("consumer thread", "writer stream", "plan", "fetch", "milliseconds"):
        assert f"<!-- {label} -->" in text


def test_another_file_is_refused(refused: Callable[..., str], tmp_path: Path, npy: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert "x.json is not a trace of rowferry" in refused("trace", tmp_path / "x.json")
    assert "rows.npy is not a trace of rowferry" in refused("trace", npy)
    assert "No such file" in refused("trace", tmp_path / "no.json")


def test_an_unknown_suffix_is_refused(refused: Callable[..., str], trace: Path) -> None:
    assert "xyz" in refused("trace", trace, "--out", trace.with_suffix(".xyz"))


def test_without_matplotlib_the_extra_is_named(
    refused: Callable[..., str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'rowferry[plot]'" in refused("trace", trace)
