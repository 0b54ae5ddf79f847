"""``mover="auto"`` on a simulated device whose link and host are as fast as a test says: the faster way is taken."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.pipeline._trial import SETTLE
from rowferry.pipeline.testing._timed_host import TimedHost
from rowferry.stores import ArrayStore
from rowferry.stores._casts import cast
from rowferry.stores.testing import CostlyStore, SimulatedDevice

ROWS, WIDTH, BATCH = 8_192, 32, 128


class Machine:
    """A simulated device with rates in GB/s, and a count of the bytes that each kind of work moved.

    Attributes:
        kernel: how fast a kernel reads and writes over the bus; ``engine``: the copy engine; ``host``: a host thread.
    """

    def __init__(self, *, kernel: float, host: float, engine: float = 50.0) -> None:
        self.kernel, self.host, self.engine = kernel, host, engine
        self.moved: Counter[str] = Counter()
        self.device = SimulatedDevice(free_bytes=64 << 20)
        self.device.cost = self._cost

    def store(self, memory: Tensor) -> CostlyStore:
        """Rows in ``memory``, that host threads read and write at their rate."""
        read, write = functools.partial(self._by_host, "gathered"), functools.partial(self._by_host, "scattered")
        return CostlyStore(ArrayStore(memory), read=read, write=write, in_memory=True)

    def pipeline(self, source: Any, **keywords: Any) -> Pipeline:
        """By default over random batches, some of whose rows repeat, in windows of two batches."""
        rng = np.random.default_rng(0)
        settings = {
            "batch_sampler": [rng.integers(0, ROWS, BATCH) for _ in range(70)],
            "lookahead": 2,
            "depth": 2,
            "staging_bytes": 1 << 20,
        }
        pipe = Pipeline(source, device=self.device, **{**settings, **keywords})  # type: ignore[arg-type]  # simulated
        pipe._new_host = lambda: TimedHost(self.device)
        return pipe

    def _by_host(self, what: str, nbytes: int) -> None:
        self.moved[what] += nbytes
        self.device.spend(nbytes / self.host / 1e9)

    def _cost(self, stream: str, name: str, nbytes: int) -> float:
        if name in ("fetch", "drain") or (name == "copy" and stream in ("fetch", "writer")):
            self.moved[f"{name} on {stream}"] += nbytes
        rates = {"fetch": self.kernel, "drain": self.kernel, "copy": self.engine}
        return nbytes / rates[name] / 1e9 if name in rates else 0.0


def table(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, width, dtype=dtype, generator=torch.Generator().manual_seed(0))


def read_all(pipe: Pipeline, *, windows: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Index and rows of each batch, up to so many windows."""
    found = []
    for batch in pipe:
        index, rows = torch.empty_like(batch.index), torch.empty_like(batch.data)
        device = pipe._device
        device.launch("note", functools.partial(Tensor.copy_, index, batch.index), reads=[batch.index])
        device.launch("note", functools.partial(Tensor.copy_, rows, batch.data), reads=[batch.data])
        found.append((index, rows))
        if windows is not None and pipe.stats().windows == windows:
            break
    pipe._device.drain()  # type: ignore[attr-defined]  # a simulated device
    return found


@pytest.mark.parametrize(
    ("kernel", "host", "taken"),
    [(40.0, 20.0, "zero-copy"), (5.0, 20.0, "copy"), (10.0, 11.0, "zero-copy")],
    ids=["a slow host", "a slow kernel", "a host hardly faster"],
)
def test_the_faster_way_is_taken_within_twenty_windows(kernel: float, host: float, taken: str) -> None:
    machine = Machine(kernel=kernel, host=host, engine=1_000.0)
    with machine.pipeline(machine.store(table())) as pipe:
        read_all(pipe, windows=SETTLE)
        stats = pipe.stats()
    assert stats.mover == taken
    other = {"zero-copy": "copy", "copy": "zero-copy"}[taken]
    assert stats.mover_why.startswith(f"{taken}: ")
    assert f"GB/s by {other}" in stats.mover_why


def test_the_choice_is_told_in_the_log_and_by_stats_after_close(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(kernel=5.0, host=20.0)
    with caplog.at_level(logging.INFO, "rowferry"), machine.pipeline({"x": machine.store(table())}) as pipe:
        assert pipe.stats().mover_why == "zero-copy, copy are tried on the first windows"
        for _ in pipe:
            pass
    told = [record.message for record in caplog.records if record.message.startswith("reading x by ")]
    assert told == [f"reading x by {pipe.stats().mover_why}"]


def test_rows_are_exact_and_each_is_read_once_while_ways_are_tried() -> None:
    machine, memory = Machine(kernel=10.0, host=20.0), table()
    with machine.pipeline(machine.store(memory)) as pipe:
        found = read_all(pipe)
        stats = pipe.stats()
    assert len(found) == 70
    for index, rows in found:
        assert torch.equal(rows, memory[index])
    assert machine.moved["gathered"]
    assert machine.moved["fetch on fetch"]
    assert machine.moved["gathered"] + machine.moved["fetch on fetch"] == stats.bytes_fetched
    assert machine.moved["gathered"] == machine.moved["copy on fetch"]


def test_the_choice_is_corrected_when_its_rate_falls(caplog: pytest.LogCaptureFixture) -> None:
    machine, memory = Machine(kernel=40.0, host=20.0), table()
    with caplog.at_level(logging.INFO, "rowferry"), machine.pipeline(machine.store(memory)) as pipe:
        read_all(pipe, windows=30)
        assert pipe.stats().mover == "zero-copy"
        machine.kernel = 4.0
        assert all(torch.equal(rows, memory[index]) for index, rows in read_all(pipe))
        stats = pipe.stats()
    assert stats.mover == "copy"
    assert stats.mover_why.startswith("tried again (zero-copy fell from ")
    assert sum("reading rows by" in record.message for record in caplog.records) <= 2


@pytest.mark.parametrize(("kernel", "host", "taken"), [(40.0, 10.0, "zero-copy"), (2.0, 20.0, "copy")])
def test_writing_is_chosen_by_itself(kernel: float, host: float, taken: str) -> None:
    machine, memory = Machine(kernel=kernel, host=host), table()
    plain = memory.clone()
    with machine.pipeline(machine.store(memory), writable=True, depth=3) as pipe:
        for batch in pipe:
            values = batch.values
            machine.device.launch("step", functools.partial(Tensor.add_, values, 1.0), reads=[values], writes=[values])
            batch.write_back()
        pipe.flush()
        stats = pipe.stats()
    for index in machine_batches():
        plain[np.unique(index)] += 1
    assert torch.equal(memory, plain)
    assert f"; writing: {taken}: " in stats.mover_why
    assert machine.moved["scattered"]
    assert machine.moved["drain on writer"] or machine.moved["copy on writer"]


def machine_batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, ROWS, BATCH) for _ in range(70)]


def test_each_column_has_a_choice_of_its_own() -> None:
    machine = Machine(kernel=10.0, host=30.0)
    slow = CostlyStore(ArrayStore(table()), read=lambda nbytes: machine.device.spend(nbytes / 1e9), in_memory=True)
    with machine.pipeline({"fast": machine.store(table()), "slow": slow}) as pipe:
        for _ in pipe:
            pass
        why = pipe.stats().mover_why
    assert why.startswith("fast: copy: ")
    assert "; slow: zero-copy: " in why


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
def test_a_fixed_choice_is_kept_and_nothing_else_is_tried(mover: str) -> None:
    machine = Machine(kernel=1.0 if mover == "zero-copy" else 50.0, host=1.0 if mover == "copy" else 50.0)
    with machine.pipeline(machine.store(table()), mover=mover) as pipe:
        read_all(pipe)
        assert pipe.stats().mover == mover
    assert set(machine.moved) == ({"gathered", "copy on fetch"} if mover == "copy" else {"fetch on fetch"})


def test_pinned_memory_of_the_way_that_lost_is_given_back_at_the_next_epoch() -> None:
    machine = Machine(kernel=40.0, host=1.0)
    with machine.pipeline(machine.store(table())) as pipe:
        read_all(pipe)
        held = pipe.stats().bytes_pinned
        read_all(pipe)
        assert pipe.stats().bytes_pinned < held


# ---- casts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "host", "taken"), [(2.0, 1_000.0, "copy, cast on the host"), (1_000.0, 0.5, "zero-copy")])
def test_rows_are_cast_before_they_cross_where_that_is_faster(engine: float, host: float, taken: str) -> None:
    machine, memory = Machine(kernel=2.0, host=host, engine=engine), table(dtype=torch.float64)
    with machine.pipeline(machine.store(memory), dtype=torch.float32) as pipe:
        found = read_all(pipe)
        stats = pipe.stats()
    assert stats.mover == taken
    for index, rows in found:
        assert torch.equal(rows, cast(memory[index], torch.float32))


def test_a_writable_pipeline_and_integers_are_not_cast_on_the_host() -> None:
    machine = Machine(kernel=2.0, host=1_000.0, engine=1_000.0)
    for source, more in (
        (table(dtype=torch.float64), {"writable": True}),
        (torch.arange(ROWS * 4).view(ROWS, 4), {"dtype": {"x": torch.int32}}),
    ):
        with machine.pipeline({"x": machine.store(source)}, **{"dtype": torch.float32, **more}) as pipe:
            for _ in pipe:
                pass
            assert "cast on the host" not in pipe.stats().mover_why


# ---- runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mover", ["auto", "copy", "zero-copy"])
def test_rows_in_order_go_as_plain_copies_without_a_kernel_or_a_host_thread(mover: str) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), table()
    with machine.pipeline(machine.store(memory), batch_sampler=None, batch_size=BATCH, mover=mover) as pipe:
        found = read_all(pipe)
    assert torch.equal(torch.cat([rows for _, rows in found]), memory)
    assert set(machine.moved) == {"copy on fetch"}


@pytest.mark.parametrize(
    "batches",
    [
        [range(50), range(50, 120)],
        [slice(10, 60), np.arange(60, 70)],
        [np.arange(30, 40), np.arange(0, 35)],
        [[3, 4, 5], [], [6]],
    ],
    ids=["ranges", "a slice and an array", "over each other", "lists"],
)
def test_batches_that_make_up_a_range_cross_as_one_copy(batches: Any) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), table()
    with machine.pipeline(machine.store(memory), batch_sampler=batches, depth=1, lookahead=1, mover="zero-copy") as pipe:
        found = read_all(pipe)
    assert all(torch.equal(rows, memory[index]) for index, rows in found)
    assert machine.device.ran["fetch"] == 0


def test_what_only_looks_like_a_range_is_gathered() -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), table()
    batches = [[5, 5, 7], [20, 90, 22], [40, 42, 44]]
    with machine.pipeline(machine.store(memory), batch_sampler=batches, depth=1, lookahead=1, mover="zero-copy") as pipe:
        found = read_all(pipe)
    assert all(torch.equal(rows, memory[index]) for index, rows in found)
    assert machine.device.ran["fetch"] == len(batches)


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
def test_a_store_that_is_filled_in_order_is_written_by_plain_copies(mover: str) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), torch.zeros(ROWS, WIDTH)
    settings: dict[str, Any] = {"batch_sampler": None, "batch_size": BATCH, "writable": True, "fetch": False, "mover": mover}
    with machine.pipeline(machine.store(memory), **settings) as pipe:
        for number, batch in enumerate(pipe):
            batch.write_back(torch.full((BATCH, WIDTH), float(number)))
        pipe.flush()
    assert torch.equal(memory[:, 0], torch.arange(ROWS).div(BATCH, rounding_mode="floor").float())
    assert set(machine.moved) == {"copy on writer"}


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
def test_rows_that_were_not_written_back_stay_although_the_others_make_a_range_with_them(mover: str) -> None:
    machine, memory = Machine(kernel=40.0, host=1.0), torch.zeros(ROWS, WIDTH)
    settings: dict[str, Any] = {"batch_sampler": None, "batch_size": BATCH, "writable": True, "fetch": False, "mover": mover}
    with machine.pipeline(machine.store(memory), **settings) as pipe:
        for number, batch in enumerate(pipe):
            if number % 3:
                batch.write_back(torch.ones(BATCH, WIDTH))
    expected = (torch.arange(ROWS) // BATCH % 3 != 0).float()
    assert torch.equal(memory[:, 0], expected)
