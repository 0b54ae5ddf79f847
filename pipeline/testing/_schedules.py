"""Runs of a pipeline on a simulated device that together need every wait, record and keep that it makes.

Each takes a seed, which decides the order of things, and a device, and raises when rows are wrong or unordered.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
    """Batches of a shuffled order, evaluated while windows are planned; what was asked is looked at on any stream."""
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
            noted = [torch.empty(len(batch), dtype=torch.int64), torch.empty(len(batch))]
            with device.use(rng.choice((device.current(), device.stream("aside")))):
                device.launch("note", functools.partial(Tensor.copy_, noted[0], batch.index), reads=[batch.index])
            device.launch("note", functools.partial(Tensor.copy_, noted[1], batch.data), reads=[batch.data])
            seen.append(noted)
            host.pause()
    device.drain()
    rows, values = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert sorted(rows.tolist()) == list(range(64))
    assert torch.equal(memory[rows], values)
    if device.races or host.escaped:
        raise [*device.races, *host.escaped][0]


def looked_up_late(seed: int, device: SimulatedDevice) -> None:
    """A batch is looked up on two streams, on one of them also when its pipeline is closed, and then both are dropped."""
    pipe = Pipeline(
        ArrayStore(torch.full((8, 2), 1e6)),
        batch_sampler=[[0, 1]],
        dtype=torch.float16,
        device=device,  # type: ignore[arg-type]
        lookahead=1,
        writable=True,
        staging_bytes=1 << 14,
        count_inf=True,
    )
    host = SimulatedHost(device, seed + 1)
    pipe._new_host = lambda: host
    batch = next(iter(pipe))
    device.drain()
    batch.lookup()
    with device.use(device.stream("another")):
        batch.lookup()
        pipe.close()
        batch.lookup()
    del batch, pipe
    for _ in range(4):
        late = device.empty((1,), torch.int64)
        device.launch("reuse", functools.partial(Tensor.zero_, late), writes=[late])
    device.drain()
    if device.races:
        raise device.races[0]


SCHEDULES = (
    any_program,
    items_and_rows_on_the_device,
    built_in_order,
    looked_up_late,
    lost_rows_are_counted,
    replanned_windows,
)
