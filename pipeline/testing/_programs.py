"""Random programs of a user, what they mean (the plain loop "read, step, write"), and ways to run them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Program:
    """What a user does with a pipeline over a table of ``rows`` rows.

    Attributes:
        batches: index batches, in order.
        written: batches that are written back; ``partly``: of these, those that write one column only.
        flushed: batches after which ``flush()`` is called.
        stop_after: batches taken before the loop breaks; None for all.
        bad_row: a row whose read fails; batches before the first that asks for it arrive, then the error.
        labelled: batches come as items, with a label that the sampler makes on the device.
        failing_writes: writes to a store that fail, by number from 1, no two in a row; the next call tries again.
    """

    rows: int
    batches: tuple[tuple[int, ...], ...]
    written: frozenset[int] = frozenset()
    partly: frozenset[int] = frozenset()
    flushed: frozenset[int] = frozenset()
    stop_after: int | None = None
    bad_row: int | None = None
    failing_writes: frozenset[int] = frozenset()
    labelled: bool = False

    @property
    def good_batches(self) -> int:
        """Batches before the first that asks for the row that cannot be read."""
        bad = [number for number, batch in enumerate(self.batches) if self.bad_row in batch]
        return min([*bad, len(self.batches) if self.stop_after is None else self.stop_after])


@dataclass(frozen=True)
class Setting:
    """How it is run."""

    lookahead: int = 4
    depth: int = 2
    mover: str = "copy"
    writable: bool = True
    slot_rows: int = 24
    streams: int = 1
    """Streams that the consumer changes between."""


@dataclass
class Outcome:
    """What came of it: served values by batch, and the stores at the end."""

    served: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stores: list[Tensor] = field(default_factory=list)


def draw_program(seed: int, *, rows: int = 12, writable: bool = True, failing: bool = False) -> Program:
    """A random program: disjoint, overlapping, equal, skewed and empty batches, flushes, early ends."""
    rng = random.Random(seed)
    count = rng.randrange(1, 12)
    kind = rng.choice(("uniform", "same", "disjoint", "skewed"))
    batches = []
    for number in range(count):
        size = rng.choice((0, 1, 2, 3, 5, 8))
        if kind == "same":
            batches.append(tuple(range(3)))
        elif kind == "disjoint":
            batches.append(tuple((number * 3 + k) % rows for k in range(min(size, 3))))
        elif kind == "skewed":
            batches.append(tuple(min(int(rng.paretovariate(1.05)) - 1, rows - 1) for _ in range(size)))
        else:
            batches.append(tuple(rng.randrange(rows) for _ in range(size)))
    some = [number for number in range(count) if writable and rng.random() < 0.8]
    return Program(
        rows,
        tuple(batches),
        frozenset(some),
        frozenset(number for number in some if rng.random() < 0.25),
        frozenset(number for number in range(count) if writable and rng.random() < 0.15),
        rng.randrange(1, count + 1) if rng.random() < 0.2 else None,
        rng.randrange(rows) if failing and rng.random() < 0.6 else None,
        frozenset(rng.sample(range(1, 12, 2), 2)) if failing and writable else frozenset(),
        rng.random() < 0.3,
    )


def draw_setting(seed: int, *, writable: bool = True) -> Setting:
    """A random way to run it."""
    rng = random.Random(seed)
    return Setting(
        lookahead=rng.choice((0, 1, 2, 3, 4, 8, 16)),
        depth=rng.choice((1, 2, 2, 3, 4)),
        mover=rng.choice(("copy", "zero-copy", "mixed", "mixed-back", "changing", "changing")),
        writable=writable,
        slot_rows=rng.choice((16, 24, 64)),
        streams=rng.choice((1, 1, 2)),
    )


def plain_loop(program: Program) -> Outcome:
    """The meaning: read, step, write, batch by batch."""
    stores = make_stores(program.rows)
    outcome = Outcome(stores=stores)
    for number, batch in enumerate(program.batches[: program.good_batches]):
        rows = torch.tensor(sorted(set(batch)), dtype=torch.int64)
        outcome.served.append((stores[0][rows].clone(), stores[1][rows].clone()))
        if number in program.written:
            stores[0][rows] = stores[0][rows] * 2 + number
            if number not in program.partly:
                stores[1][rows] = stores[1][rows] - number
    return outcome


def make_stores(rows: int) -> list[Tensor]:
    """Two columns of different width and dtype."""
    return [torch.arange(rows * 2, dtype=torch.float32).view(rows, 2), torch.arange(rows, dtype=torch.int64) * 10]
