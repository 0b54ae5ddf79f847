"""Devices, and what several tests of SpeedTorch's API share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the model is. ``cuda`` is where the rows go by themselves on a machine that has it."""
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder: scripts write files by names without one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
