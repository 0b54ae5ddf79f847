"""The notebook of first steps runs from top to bottom, and its own checks hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"

RUN = """
import sys

import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def outputs(path: Path) -> list[dict[str, Any]]:
    """What the code cells show, in order."""
    cells = json.loads(path.read_text())["cells"]
    return [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]


def kinds(path: Path) -> list[tuple[str, list[str]]]:
    """Of each output its kind, and the types of the data that it comes in. A busy kernel sends one print in several parts."""
    found: list[tuple[str, list[str]]] = []
    for output in outputs(path):
        one = (output["output_type"], sorted(output.get("data", [])))
        if one[0] != "stream" or found[-1:] != [one]:
            found.append(one)
    return found


def test_the_notebook_runs_in_a_kernel_and_shows_what_is_shown_in_it(tmp_path: Path) -> None:
    missing = [module for module in ("nbclient", "ipykernel") if find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; pip install 'rowferry[dev]' brings it")
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(tmp_path / "run.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=115)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [output for output in outputs(tmp_path / "run.ipynb") if output.get("name") == "stderr"] == []
    assert kinds(tmp_path / "run.ipynb") == kinds(NOTEBOOK)


def test_the_notebook_is_kept_as_it_ran_once_from_top_to_bottom() -> None:
    counts = [cell["execution_count"] for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_the_notebook_tells_no_path_of_the_machine_that_it_ran_on() -> None:
    text = NOTEBOOK.read_text()
    folders = {"/tmp/", "/home/", "/root/", *(f"/{folder.name}/" for folder in Path("/").iterdir() if folder.is_dir())}
    assert [folder for folder in sorted(folders) if folder in text] == []
