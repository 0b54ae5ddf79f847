"""Two records of ``rowferry bench``, of two machines or of two days, side by side. Pure, but for reading the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM, FORMAT = "rowferry bench", 1


class Pair(NamedTuple):
    """One work on both sides; None where a side did not measure it. ``change``: the second ratio over the first."""

    work: str
    measure: str
    first: float | None
    second: float | None
    change: float | None


class Comparison(NamedTuple):
    """``pairs`` in the order of the first record, and lines on what differs besides speed."""

    names: tuple[str, str]
    limits: tuple[dict[str, Any], dict[str, Any]]
    pairs: list[Pair]
    differences: list[str]


def load(path: Path) -> dict[str, Any]:
    """A record that ``rowferry bench --json`` wrote.

    Raises:
        OSError: it can't be read. ValueError: it is something else, or of another format.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON; name two files that 'rowferry bench --json FILE' wrote") from error
    if not isinstance(record, dict) or record.get("program") != PROGRAM or record.get("format") != FORMAT:
        raise ValueError(f"{path} is not a record of '{PROGRAM}' of format {FORMAT}; measure again with --json FILE")
    return record


def compare(first: dict[str, Any], second: dict[str, Any]) -> Comparison:
    """Join two records by work."""
    mine, theirs = ({each["work"]: each for each in record["results"]} for record in (first, second))
    works = list(dict.fromkeys((*mine, *theirs)))
    pairs = []
    for work in works:
        a, b = mine.get(work, {}).get("ratio"), theirs.get(work, {}).get("ratio")
        measure = (mine.get(work) or theirs[work]).get("measure") or theirs.get(work, {}).get("measure") or ""
        pairs.append(Pair(work, measure, a, b, b / a if a and b else None))
    differences = [
        f"{what} {name}: {first[what].get(name)} and {second[what].get(name)}"
        for what in ("sizes", "machine")
        for name in dict.fromkeys((*first[what], *second[what]))
        if name != "date" and first[what].get(name) != second[what].get(name)
    ]
    return Comparison((_name(first), _name(second)), (first["limit"], second["limit"]), pairs, differences)


def _name(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return str(machine.get("gpu") or machine.get("processor") or "unknown")
