"""Movers that change between windows: rows that one wrote are read by another, and each waits for what it must."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline, _runs
from rowferry.pipeline.testing._host import SimulatedHost
from rowferry.pipeline.testing._judges import Changing, set_movers
from rowferry.pipeline.testing._plain_loop import Program, Setting, require_equal, run_pipeline
from rowferry.stores import ArrayStore
from rowferry.stores._casts import cast
from rowferry.stores.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = 150


def rows_that_come_back(seed: int) -> tuple[Program, Setting]:
    """Rows come back after all slots were used by others, of which none or few were written: the host that reads them waits
    for a drain that a kernel made long ago, and that only kernels were ordered after."""
    rng = random.Random(seed)
    depth = rng.choice((2, 2, 3))
    cycle, count = depth + 1, rng.randrange(8, 16)
    batches = tuple((number % cycle, number % cycle + 5) for number in range(count))
    written = frozenset(number for number in range(count) if number % cycle == 0 or rng.random() < 0.1)
    program = Program(12, batches, written, frozenset(number for number in written if rng.random() < 0.2))
    return program, Setting(lookahead=1, depth=depth, mover="changing", slot_rows=16)


def rows_in_runs(seed: int) -> tuple[Program, Setting]:
    """Batches that are ranges, apart or over each other, most of them written: windows cross as plain copies, or nearly."""
    rng = random.Random(seed)
    batches = []
    for _ in range(rng.randrange(2, 12)):
        start, length = rng.randrange(30), rng.choice((1, 2, 4, 6))
        batch = list(range(start, min(start + length, 32)))
        if rng.random() < 0.1 and len(batch) > 2:
            batch[1] = batch[0]  # its ends look like a range's
        batches.append(tuple(batch))
    written = frozenset(number for number in range(len(batches)) if rng.random() < 0.8)
    flushed = frozenset(number for number in range(len(batches)) if rng.random() < 0.2)
    program = Program(32, tuple(batches), written, frozenset(n for n in written if rng.random() < 0.2), flushed)
    mover = rng.choice(("changing", "copy", "zero-copy"))
    return program, Setting(lookahead=rng.choice((1, 2, 4)), depth=rng.choice((1, 1, 2, 3)), mover=mover, slot_rows=64)


@pytest.mark.parametrize("draw", [rows_that_come_back, rows_in_runs])
def test_any_schedule_with_changing_movers_equals_the_plain_loop(
    draw: Callable[[int], tuple[Program, Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runs, "RUN_BYTES", 1)  # any number of runs goes as plain copies
    for seed in range(SEEDS):
        program, setting = draw(seed)
        try:
            require_equal(program, setting, run_pipeline(program, setting, seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: {program} {setting}")
            raise


def test_rows_cast_on_the_host_in_some_windows_and_on_the_device_in_others_have_the_same_bits() -> None:
    """A window holds float16 or float64 rows, and takes over rows of windows that hold the other."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        memory = torch.from_numpy(rng.standard_normal((24, 3)) * 10.0 ** rng.integers(-9, 7, (24, 3)))
        batches = [rng.integers(0, 24, rng.integers(1, 9)) for _ in range(14)]
        device = SimulatedDevice(seed)
        pipe = Pipeline(
            ArrayStore(memory),
            batch_sampler=batches,
            dtype=torch.float16,
            device=device,  # type: ignore[arg-type]  # a simulated device is taken as it is
            lookahead=int(rng.integers(1, 4)),
            depth=int(rng.integers(1, 4)),
            staging_bytes=1 << 14,
        )
        judges = set_movers(pipe, "changing", seed)
        host = SimulatedHost(device, seed + 1)
        pipe._new_host = lambda host=host: host  # type: ignore[misc]
        seen = []
        with pipe:
            for batch in pipe:
                noted = torch.empty(tuple(batch.data.shape), dtype=torch.float16)
                device.launch("note", functools.partial(Tensor.copy_, noted, batch.data), reads=[batch.data])
                seen.append(noted)
                host.pause()
        device.drain()
        assert not device.races
        for index, rows in zip(batches, seen, strict=True):
            assert torch.equal(rows.view(torch.int16), cast(memory[index], torch.float16).view(torch.int16))
        judge = judges[0]
        assert isinstance(judge, Changing)
        if seed == 0:
            assert {0, 2} <= set(judge.turns)


def test_rows_of_a_window_that_were_not_written_back_stay_also_where_movers_change() -> None:
    """With ``fetch=False`` they are undefined in the slot."""
    for seed in range(20):
        device, memory = SimulatedDevice(seed), torch.zeros(16, 1)
        pipe = Pipeline(
            ArrayStore(memory),
            batch_size=2,
            device=device,  # type: ignore[arg-type]
            writable=True,
            fetch=False,
            lookahead=4,
            staging_bytes=1 << 14,
        )
        set_movers(pipe, "changing", seed)
        host = SimulatedHost(device, seed + 1)
        pipe._new_host = lambda host=host: host  # type: ignore[misc]
        with pipe:
            for number, batch in enumerate(pipe):
                if number % 4 < 2 or seed % 2:
                    new = device.empty((2, 1), torch.float32)
                    device.launch("new", functools.partial(Tensor.fill_, new, 1.0), writes=[new])
                    batch.write_back(new)
                    del new
                host.pause()
        expected = torch.ones(16) if seed % 2 else (torch.arange(16) // 2 % 4 < 2).float()
        assert torch.equal(memory[:, 0], expected)
