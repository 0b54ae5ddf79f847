"""Batch t sees every row as if all batches before it had been written back in full: bit for bit the plain loop."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline.testing._plain_loop import (
    Program,
    Setting,
    draw_program,
    draw_setting,
    require_equal,
    run_pipeline,
)
from rowferry.stores import ArrayStore, PinnedStore, Store

SCHEDULES, CHUNK = 2_000, 100
LONG_SCHEDULES = int(os.environ.get("ROWFERRY_SCHEDULES", "20000"))
LONG_CHUNKS = 20


def holds(seed: int) -> None:
    """Every fourth schedule is read-only, every third meets a store that fails."""
    writable = seed % 4 != 0
    program = draw_program(seed, writable=writable, failing=seed % 3 == 0)
    setting = draw_setting(seed, writable=writable)
    try:
        require_equal(program, setting, run_pipeline(program, setting, seed))
    except BaseException as error:
        error.add_note(f"seed {seed}: {program} {setting}")
        raise


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_any_schedule_on_a_simulated_device_equals_the_plain_loop(first: int) -> None:
    for seed in range(first, first + CHUNK):
        holds(seed)


def draw_wide(seed: int) -> tuple[Program, Setting]:
    """Batches of very different size beside slots of a few: the next window's size is guessed wrong, and it is cut."""
    rng = random.Random(seed)
    rows, count, writable = rng.choice((60, 300)), rng.randrange(3, 16), seed % 4 != 0
    batches = tuple(tuple(rng.randrange(rows) for _ in range(rng.choice((0, 2, 2, 30, 80)))) for _ in range(count))
    written = frozenset(number for number in range(count) if writable and rng.random() < 0.8)
    program = Program(
        rows,
        batches,
        written,
        frozenset(number for number in written if rng.random() < 0.25),
        frozenset(number for number in range(count) if writable and rng.random() < 0.15),
        rng.randrange(1, count + 1) if rng.random() < 0.2 else None,
        rng.randrange(rows) if seed % 3 == 0 and rng.random() < 0.5 else None,
        frozenset(rng.sample(range(1, 12, 2), 2)) if seed % 3 == 0 and writable else frozenset(),
    )
    setting = Setting(
        lookahead=rng.choice((2, 3, 4, 8, 16)),
        depth=rng.choice((1, 2, 2, 3, 4)),
        mover=rng.choice(("copy", "zero-copy", "mixed", "mixed-back", "changing", "changing")),
        writable=writable,
        slot_rows=rng.choice((16, 24, 32)),
        streams=rng.choice((1, 1, 2)),
    )
    return program, setting


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("first", range(0, 600, CHUNK))
def test_windows_that_are_cut_equal_the_plain_loop(first: int) -> None:
    for seed in range(first, first + CHUNK):
        program, setting = draw_wide(seed)
        try:
            require_equal(program, setting, run_pipeline(program, setting, seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: {program} {setting}")
            raise


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("chunk", range(LONG_CHUNKS))
def test_a_long_search_over_schedules_equals_the_plain_loop(chunk: int) -> None:
    """``ROWFERRY_SCHEDULES`` is the number of schedules, after those of the short search; chunk by chunk."""
    for seed in range(SCHEDULES + chunk, SCHEDULES + LONG_SCHEDULES, LONG_CHUNKS):
        holds(seed)


# ---- the CPU, with real threads ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A training loop over a table of ``rows`` rows: which batches are written, flushed after, and where it breaks."""

    rows: int
    batches: tuple[tuple[int, ...], ...]
    written: frozenset[int]
    flushed: frozenset[int]
    taken: int


def draw_loop(seed: int) -> Loop:
    rng = random.Random(seed)
    rows, count = rng.choice((4, 16, 64)), rng.randrange(4, 30)
    kind = rng.choice(("uniform", "same", "disjoint", "skewed"))
    batches: list[tuple[int, ...]] = []
    for number in range(count):
        size = rng.choice((0, 1, 3, 6, 10))
        if kind == "same":
            batches.append((0, 1, 2, 1))
        elif kind == "disjoint":
            batches.append(tuple((number * 3 + k) % rows for k in range(min(size, 3))))
        elif kind == "skewed":
            batches.append(tuple(min(int(rng.paretovariate(1.05)) - 1, rows - 1) for _ in range(size)))
        else:
            batches.append(tuple(rng.randrange(rows) for _ in range(size)))
    return Loop(
        rows,
        tuple(batches),
        frozenset(number for number in range(count) if rng.random() < 0.8),
        frozenset(number for number in range(count) if rng.random() < 0.1),
        rng.randrange(1, count) if rng.random() < 0.3 else count,
    )


def table(rows: int) -> Tensor:
    return torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)


def stepped(values: Tensor, number: int) -> Tensor:
    return values * 1.5 + number


def plainly(loop: Loop) -> tuple[list[Tensor], Tensor]:
    """What the batches see, and the table at the end."""
    values, seen = table(loop.rows), []
    for number, batch in enumerate(loop.batches[: loop.taken]):
        rows = torch.tensor(sorted(set(batch)), dtype=torch.int64)
        seen.append(values[rows].clone())
        if number in loop.written:
            values[rows] = stepped(values[rows], number)
    return seen, values


def ferried(loop: Loop, store: Store, memory: Tensor, **keywords: Any) -> list[Tensor]:
    """The same through a pipeline, on real threads; after each flush the store is what the plain loop has then."""
    seen: list[Tensor] = []
    index = [np.array(batch, np.int64) for batch in loop.batches]
    with Pipeline(store, batch_sampler=index, device="cpu", writable=True, **keywords) as pipe:
        for number, batch in enumerate(pipe):
            seen.append(batch.values.clone())
            assert batch.rows[batch.inverse].tolist() == list(loop.batches[number])
            if number in loop.written:
                if number % 2:
                    batch.values.copy_(stepped(batch.values, number))
                    batch.write_back()
                else:
                    batch.write_back(stepped(batch.values, number))
            if number in loop.flushed:
                pipe.flush()
                so_far = Loop(loop.rows, loop.batches, loop.written, loop.flushed, number + 1)
                assert torch.equal(memory, plainly(so_far)[1])
            if number + 1 == loop.taken:
                break
    return seen


def require_same(loop: Loop, seen: Sequence[Tensor], memory: Tensor) -> None:
    wanted, end = plainly(loop)
    assert len(seen) == len(wanted)
    for number, (mine, plain) in enumerate(zip(seen, wanted, strict=True)):
        assert torch.equal(mine, plain), f"batch {number} of {loop}"
    assert torch.equal(memory, end), f"the store after {loop}"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 4, 16])
def test_windows_on_a_cpu_equal_the_plain_loop_at_any_lookahead_and_depth(lookahead: int, depth: int) -> None:
    for seed in range(8):
        loop = draw_loop(seed * 1_000 + lookahead * 10 + depth)
        memory = table(loop.rows)
        staging = (depth if lookahead else 1) * (1024 if seed % 2 else 1 << 16)
        seen = ferried(loop, ArrayStore(memory), memory, mover="copy", lookahead=lookahead, depth=depth, staging_bytes=staging)
        require_same(loop, seen, memory)


def test_local_rows_equal_the_plain_loop() -> None:
    for seed in range(40):
        loop = draw_loop(seed)
        memory = table(loop.rows)
        require_same(loop, ferried(loop, ArrayStore(memory), memory, mover="local"), memory)


def test_a_pinned_store_equals_the_plain_loop() -> None:
    for seed in range(20):
        loop = draw_loop(seed)
        store = PinnedStore.from_array(table(loop.rows))
        require_same(loop, ferried(loop, store, store.torch(), mover="copy", lookahead=4), store.torch())


def test_batches_beyond_the_first_of_lookahead_see_updates() -> None:
    """Rows 1, 2 and 3 are stepped once, three times and once: a pipeline one batch stale ends elsewhere."""
    for lookahead in (0, 1, 2, 16):
        for depth in (1, 2, 3):
            memory = torch.zeros(5, 1)
            with Pipeline(
                ArrayStore(memory),
                batch_sampler=[[1, 2], [2, 3], [2]],
                device="cpu",
                mover="copy",
                lookahead=lookahead,
                depth=depth,
                writable=True,
            ) as pipe:
                for batch in pipe:
                    batch.values.add_(1)
                    batch.write_back()
            assert memory.view(-1).tolist() == [0, 1, 3, 1, 0]


def test_evaluation_inside_the_training_loop_sees_what_was_written_so_far() -> None:
    memory = torch.zeros(6, 1)
    store = ArrayStore(memory)
    seen = []
    with (
        Pipeline(store, batch_sampler=[[0, 1], [1, 2], [1]], device="cpu", mover="copy", lookahead=4, writable=True) as train,
        Pipeline(store, batch_size=6, device="cpu", mover="copy", lookahead=4) as evaluate,
    ):
        for batch in train:
            batch.write_back(batch.values + 1)
            seen += [found.data.view(-1).tolist() for found in evaluate]
    assert seen == [[1, 1, 0, 0, 0, 0], [1, 2, 1, 0, 0, 0], [1, 3, 1, 0, 0, 0]]
