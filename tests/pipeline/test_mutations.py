"""Each wait, record and keep of the pipeline is needed: leave one out, and some schedule shows a race or wrong rows."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import rowferry.pipeline
from rowferry.pipeline.testing._schedules import SCHEDULES
from rowferry.stores.testing import SimulatedDevice

FOLDER = Path(rowferry.pipeline.__file__).parent
ORDERING = ("wait", "record", "keep")
SEEDS = 400  # of each kind of schedule; nearly all sites show in the first twenty that reach them

ELSEWHERE = {
    "_chosen.py": "events that only tell the time: nothing is ordered by them",
    "_clock.py": "tells times; nothing is ordered by it",
    "_warm.py": "runs at construction, on CUDA only, and waits for itself",
    "prefetch.py": "has schedules of its own",
    "_local.py": "runs on the consumer's stream alone; the simulated device has no rows of its own to read directly",
    "device.keep(leaf, stream)": "tensors of CUDA in an item; the simulated device has none, shown on a GPU",
}


class Site(NamedTuple):
    """A call of ``kind`` in ``file``, from line ``first`` to ``last``."""

    kind: str
    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.file}:{self.first}"


def written_sites() -> list[Site]:
    """Every place in the pipeline's own files that orders or keeps something on a device."""
    sites = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in ORDERING:
                continue
            owner = ast.unparse(node.func.value)
            if owner.split(".")[-1].lstrip("_") != "device" or path.name in ELSEWHERE or ast.unparse(node) in ELSEWHERE:
                continue
            sites.append(Site(node.func.attr, path.name, node.lineno, node.end_lineno or node.lineno))
    return sites


# ---- the search -------------------------------------------------------------------------------------------------


def run_without(
    schedule: Callable[[int, SimulatedDevice], None], seed: int, left_out: Site | None
) -> set[tuple[str, str, int]]:
    """Run it with every call at ``left_out`` ignored; where it called wait, record and keep."""
    met = set()
    device = SimulatedDevice(seed)

    def drop(kind: str, stream: object, event: object, number: int) -> bool:
        del stream, event, number
        path, line = device.site().rsplit(":", 1)
        at = (kind, Path(path).name, int(line))
        met.add(at)
        return left_out is not None and is_at(left_out, at)

    device.drop = drop
    schedule(seed, device)
    return met


def is_at(site: Site, at: tuple[str, str, int]) -> bool:
    kind, file, line = at
    return kind == site.kind and file == site.file and site.first <= line <= site.last


@functools.cache
def met_by(schedule: Callable[[int, SimulatedDevice], None], seed: int) -> set[tuple[str, str, int]]:
    return run_without(schedule, seed, None)


def is_detected(site: Site) -> bool:
    schedules = list(SCHEDULES)
    for seed in range(SEEDS):
        if seed == 40:  # those that have not come to the site by now never do
            schedules = [
                each for each in schedules if any(is_at(site, at) for early in range(40) for at in met_by(each, early))
            ]
        for schedule in schedules:
            if any(is_at(site, at) for at in met_by(schedule, seed)):
                try:
                    run_without(schedule, seed, site)
                except (AssertionError, RuntimeError, OSError):  # races, deadlocks and slots in a wrong state among them
                    return True
    return False


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("site", written_sites(), ids=str)
def test_leaving_out_one_is_detected(site: Site) -> None:
    assert is_detected(site), f"nothing shows that {site} is needed: delete it, or write the schedule that needs it"


def test_every_kind_of_site_is_found_in_the_sources() -> None:
    found = written_sites()
    assert {site.kind for site in found} == set(ORDERING)
    assert {"_producer.py", "_consumer.py", "_writer.py", "_copy.py", "_movers.py"} <= {site.file for site in found}
