"""Each wait, record and keep of the pipeline is needed: leave one out, and some schedule shows a race or wrong rows."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import rowferry.pipeline
from rowferry.pipeline import Pipeline
from rowferry.pipeline._movers import Resident
from rowferry.pipeline.testing._host import SimulatedHost
from rowferry.pipeline.testing._plain_loop import (
    Program,
    Setting,
    draw_program,
    draw_setting,
    require_equal,
    run_pipeline,
)
from rowferry.stores import ArrayStore
from rowferry.stores.testing import FailingStore, SimulatedDevice

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


# ---- schedules --------------------------------------------------------------------------------------------------


def any_program(seed: int, device: SimulatedDevice) -> None:
    writable = seed % 4 != 0
    program = draw_program(seed, writable=writable, failing=seed % 3 == 0)
    setting = draw_setting(seed, writable=writable)
    require_equal(program, setting, run_pipeline(program, setting, seed, device))


def replanned_windows(seed: int, device: SimulatedDevice) -> None:
    """Few rows, carried from window to window, and one that cannot be read: windows are discarded and planned again."""
    rng = random.Random(seed)
    batches = [rng.sample(range(4), rng.randrange(1, 4)) for _ in range(rng.randrange(4, 14))]
    batches[rng.randrange(2, len(batches))].append(5)
    program = Program(6, tuple(map(tuple, batches)), frozenset(range(len(batches))), bad_row=5)
    setting = Setting(lookahead=rng.choice((2, 3, 4)), depth=rng.choice((2, 3)), slot_rows=64)
    require_equal(program, setting, run_pipeline(program, setting, seed, device))


class Late:
    """Something of the user's that is made on the device by the sampler, and moves itself, as a graph does."""

    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self._device = device
        self._made = device.empty((2,), torch.float32)
        made = self._made
        device.launch("make", lambda: made.fill_(number), writes=[made])

    def to(self, target: torch.device, non_blocking: bool = False) -> Tensor:
        del target, non_blocking
        made, out = self._made, self._device.empty((2,), torch.float32)
        self._device.launch("move", lambda: out.copy_(made), reads=[made], writes=[out])
        self._device.keep(made, self._device.current())
        return out


def double_and_add(values: Tensor, number: int) -> None:
    values.mul_(2).add_(number)


def items_and_rows_on_the_device(seed: int, device: SimulatedDevice) -> None:
    """Items carry tensors of the host and objects of the device; the rows live on the device and never cross."""
    rng = random.Random(seed)
    memory, plain = torch.arange(16, dtype=torch.float32).view(8, 2), torch.arange(16, dtype=torch.float32).view(8, 2)
    index = [np.array([rng.randrange(8) for _ in range(rng.choice((1, 2, 4)))]) for _ in range(8)]

    class Items:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number, rows in enumerate(index):
                yield {"rows": rows, "label": torch.full((3,), number), "late": Late(device, number)}

    pipe = Pipeline(
        ArrayStore(memory),
        batch_sampler=Items(),
        index="rows",
        device=device,  # type: ignore[arg-type]  # a simulated device is taken as it is
        lookahead=rng.choice((1, 2, 4)),
        depth=rng.choice((1, 2, 3)),
        mover="copy",
        writable=True,
        staging_bytes=1 << 14,
    )
    assert pipe._parts is not None
    store = pipe._source.tables[0].columns[0].store
    pipe._parts.movers[0][0] = Resident(device, store)  # type: ignore[index]  # a list
    host = SimulatedHost(device, seed + 1)
    pipe._new_host = lambda: host
    seen = []
    with pipe:
        for number, batch in enumerate(pipe):
            values, label, late = batch.values, batch.item["label"], batch.item["late"]
            noted = [torch.empty(tuple(values.shape)), torch.empty(3, dtype=torch.int64), torch.empty(2)]
            for into, tensor in zip(noted, (values, label, late), strict=True):
                device.launch("note", functools.partial(Tensor.copy_, into, tensor), reads=[tensor])
            seen.append(noted)
            device.launch("step", functools.partial(double_and_add, values, number), reads=[values], writes=[values])
            batch.write_back()
            del values, label, late, batch
            host.pause()
    device.drain()
    for number, (rows, noted) in enumerate(zip(index, seen, strict=True)):
        distinct = torch.from_numpy(np.unique(rows))
        assert torch.equal(noted[0], plain[distinct])
        assert noted[1].tolist() == [number] * 3
        assert noted[2].tolist() == [number] * 2
        plain[distinct] = plain[distinct] * 2 + number
    assert torch.equal(memory, plain)
    if device.races or host.escaped:
        raise [*device.races, *host.escaped][0]


def lost_rows_are_counted(seed: int, device: SimulatedDevice) -> None:
    """Every write fails, and closing says how many rows are lost."""
    rng = random.Random(seed)
    rows = rng.sample(range(8), rng.randrange(1, 6))
    store = FailingStore(ArrayStore(torch.zeros(8, 2)), OSError("the disk is on fire"), writes=range(1, 100))
    pipe = Pipeline(
        store,
        batch_sampler=[rows],
        device=device,  # type: ignore[arg-type]
        lookahead=1,
        writable=True,
        staging_bytes=1 << 14,
    )
    host = SimulatedHost(device, seed + 1)
    pipe._new_host = lambda: host
    for batch in pipe:
        batch.write_back()
        break
    with pytest.raises(OSError, match="fire") as caught:
        pipe.close()
    assert f"{len(rows)} changed rows are lost" in " ".join(caught.value.__notes__)


def built_in_order(seed: int, device: SimulatedDevice) -> None:
    """Batches of a shuffled order, evaluated while windows are planned."""
    rng = random.Random(seed)
    memory = torch.arange(64, dtype=torch.float32)
    pipe = Pipeline(
        ArrayStore(memory),
        batch_size=rng.choice((1, 3, 8)),
        shuffle=True,
        device=device,  # type: ignore[arg-type]
        lookahead=rng.choice((1, 2, 4)),
        depth=rng.choice((1, 2, 3)),
        mover="copy",
        staging_bytes=1 << 14,
    )
    host = SimulatedHost(device, seed + 1)
    pipe._new_host = lambda: host
    seen = []
    with pipe:
        for batch in pipe:
            noted = [torch.empty(len(batch.index), dtype=torch.int64), torch.empty(len(batch.index))]
            for into, tensor in zip(noted, (batch.index, batch.data), strict=True):
                device.launch("note", functools.partial(Tensor.copy_, into, tensor), reads=[tensor])
            seen.append(noted)
            host.pause()
    device.drain()
    rows, values = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert sorted(rows.tolist()) == list(range(64))
    assert torch.equal(memory[rows], values)
    if device.races or host.escaped:
        raise [*device.races, *host.escaped][0]


SCHEDULES = (any_program, items_and_rows_on_the_device, built_in_order, lost_rows_are_counted, replanned_windows)


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
