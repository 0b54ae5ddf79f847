"""Result files are replaced whole, so that a program that is cut off while it writes leaves the one before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from _common import write_record


def test_a_record_takes_the_place_of_the_one_before_and_never_changes_it(tmp_path: Path) -> None:
    path, before = tmp_path / "a.json", tmp_path / "before.json"
    write_record(path, {"results": [1, 2, 3]})
    os.link(path, before)  # the file itself, whatever its name becomes
    write_record(path, {"results": [4]})
    assert json.loads(path.read_text()) == {"results": [4]}
    assert json.loads(before.read_text()) == {"results": [1, 2, 3]}


def test_a_record_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_record(path, {"results": []})
    with pytest.raises(TypeError):
        write_record(path, {"results": [object()]})
    assert json.loads(path.read_text()) == {"results": []}
    assert list(tmp_path.iterdir()) == [path]
