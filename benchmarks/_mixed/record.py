"""The record: written whole after each result, so that a run that is cut off leaves what it has; a later run may add to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _common import write_record

from .output import Result, with_ratios
from .precision import NAMES

Pair = tuple[str, str]  # model, precision

# Options that choose what is measured, not under which conditions. The device's name is among the machine's facts.
CHOICES = {"models", "precisions", "fp16", "json", "merge", "draw", "no_search", "device"}


class Refused(ValueError):
    """A file that is not what an option needs; the message says why, and what to do."""


class Record:
    """``path``, as it comes to be.

    Args:
        facts: ``benchmark``, ``command``, ``machine``, ``data``, ``options``, ``tf32``.
        asked: what is about to be measured.
        earlier: the record whose results are kept until the same model and precision is measured anew.

    Raises:
        Refused: ``earlier`` was measured under other conditions; the message has what differs.
    """

    def __init__(self, path: Path, facts: dict[str, Any], asked: list[Pair], earlier: dict[str, Any] | None) -> None:
        self._path, self._facts, self._asked = path, facts, [" ".join(pair) for pair in asked]
        self._results: dict[str, Result] = {}
        self._earlier: list[dict[str, Any]] = []
        if earlier is not None:
            if found := differences(earlier, facts):
                raise Refused(
                    f"--merge cannot add to {path}, which was measured under other conditions: {'; '.join(found)}. "
                    "Give the same options, or another folder by --out"
                )
            self._results = {_key(each): each for each in earlier["results"]}
            self._asked = list(dict.fromkeys([*earlier["asked"], *self._asked]))
            self._earlier = [*earlier["earlier"], {"command": earlier["command"], "date": earlier["machine"]["date"]}]
            self._facts = {**facts, "data": list(dict.fromkeys([*earlier["data"], *facts["data"]]))}

    def keep(self, result: Result) -> None:
        """Put ``result`` in its place and write the file, which is not complete yet."""
        self._results[_key(result)] = result
        self._write(ended=False)

    def finish(self) -> dict[str, Any]:
        """Write the file for the last time: complete, if all that was ever asked for is there. Returns what it holds."""
        return self._write(ended=True)

    def _write(self, *, ended: bool) -> dict[str, Any]:
        models = list(dict.fromkeys(each["model"] for each in self._results.values()))
        ordered = sorted(self._results.values(), key=lambda each: (models.index(each["model"]), NAMES.index(each["precision"])))
        record: dict[str, Any] = {
            **self._facts,
            "earlier": self._earlier,
            "asked": self._asked,
            "complete": False,
            "results": with_ratios(ordered),
        }
        record["complete"] = ended and not missing(record)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self._path, record)
        return record


def _key(result: Result) -> str:
    return f"{result['model']} {result['precision']}"


def read(path: Path) -> dict[str, Any]:
    """The record in ``path``, complete or cut off.

    Raises:
        Refused: there is none, or it is not a record of this comparison.
    """
    if not path.exists():
        raise Refused(f"{path} does not exist; --draw needs a record, measured before. --out names its folder")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refused(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("benchmark") != "mixed_precision" or "asked" not in found:
        raise Refused(f"{path} is no record of mixed_precision.py")
    return found


def missing(record: dict[str, Any]) -> list[str]:
    """Models and precisions that were asked for and are not there, or not to their end."""
    done = {_key(each) for each in record["results"] if each["complete"]}
    return [each for each in record["asked"] if each not in done]


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Conditions that are not the same, as ``name is this there and that here``: options, machine (but the date), TF32."""
    found = []
    for part in ("options", "machine", "tf32"):
        there, here = earlier[part], now[part]
        for key in dict.fromkeys([*there, *here]):
            if key != "date" and key not in CHOICES and there.get(key) != here.get(key):
                found.append(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here")
    return found
