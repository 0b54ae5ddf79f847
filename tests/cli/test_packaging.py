"""The package is what pyproject.toml says, the command answers, and the scripts around it are whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rowferry"
COMMANDS = ("inspect", "stream", "convert", "doctor", "demo", "plan", "bench")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def folders(top: Path) -> Iterator[Path]:
    """Every folder below ``top`` that holds Python files, through links."""
    for folder, _names, files in os.walk(top, followlinks=True):
        if any(name.endswith(".py") for name in files):
            yield Path(folder)


def test_the_bare_command_prints_help_that_lists_every_command(run: Callable[..., Result]) -> None:
    result = run()
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_speaks_json(run: Callable[..., Result], command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_the_version_is_told(run: Callable[..., Result]) -> None:
    assert re.match(r"rowferry \S+", run("--version").stdout)


def test_python_m_rowferry_is_the_same_command(npy: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rowferry", "inspect", npy, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"rows": 1000' in done.stdout


def test_the_script_named_in_the_project_exists(project: dict[str, Any]) -> None:
    module, _, function = project["scripts"]["rowferry"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_the_top_folders_are_linked_into_the_package() -> None:
    for name in ("pipeline", "stores"):
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).resolve() == ROOT / name


def test_every_folder_with_code_is_a_package_so_that_the_wheel_holds_it() -> None:
    lost = [folder for folder in folders(PACKAGE) if not (folder / "__init__.py").exists()]
    assert lost == []
    assert (PACKAGE / "py.typed").exists()


def test_every_extra_that_a_message_names_can_be_installed(project: dict[str, Any]) -> None:
    code = "\n".join(path.read_text() for folder in folders(PACKAGE) for path in folder.glob("*.py"))
    named = set(re.findall(r"rowferry\[([a-z0-9]+)\]", code))
    assert "demo" in named
    assert named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("script", [".ci/run", ".ci/check-wheel"])
def test_the_scripts_can_be_run_and_stop_at_the_first_failure(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert "set -euo pipefail" in (ROOT / script).read_text()
