"""``mover="auto"`` on a simulated device whose link and host are as fast as a test says: the faster way is taken."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline._candidates import go_on, make_mover
from rowferry.pipeline._chosen import Chosen
from rowferry.pipeline._movers import Mover
from rowferry.pipeline._trial import SETTLE, Trial
from rowferry.pipeline.testing._machine import BATCH, ROWS, WIDTH, Machine, random_batches, read_all, table
from rowferry.stores import ArrayStore
from rowferry.stores._casts import cast
from rowferry.stores.testing import CostlyStore


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
    assert len(found) == 40
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
    assert sum(record.message.startswith("reading array in memory by ") for record in caplog.records) == 2


def test_windows_are_small_while_ways_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3
    monkeypatch.setattr("rowferry.pipeline._planner.WINDOW_BYTES", most * BATCH * WIDTH * 4)
    machine = Machine(kernel=40.0, host=1.0)
    tried: set[int] = set()
    later: set[int] = set()
    with machine.pipeline(machine.store(table()), lookahead=16, staging_bytes=1 << 20) as pipe:
        for _ in range(4):
            for _ in pipe:
                sizes = tried if "are tried" in pipe.stats().mover_why else later
                sizes.add(pipe.stats().batches_in_window)
    assert max(tried) == most
    assert max(later) == 16


def test_what_an_earlier_pipeline_has_learnt_of_a_store_holds_for_the_next() -> None:
    machine = Machine(kernel=40.0, host=10.0)
    store = machine.store(table())
    with machine.pipeline(store) as pipe:
        assert pipe._parts is not None
        learnt = go_on(pipe._parts.movers, None)
        read_all(pipe)
        why = pipe.stats().mover_why
    gathered = machine.moved["gathered"]
    with machine.pipeline(store) as pipe:
        assert pipe._parts is not None
        go_on(pipe._parts.movers, learnt)
        assert all(torch.equal(rows, table()[index]) for index, rows in read_all(pipe))
        assert pipe.stats().mover_why == why
        assert machine.moved["gathered"] == gathered
        machine.kernel = 1.0
        read_all(pipe)
        assert pipe.stats().mover == "copy"


def test_what_was_learnt_of_other_ways_is_not_gone_on_with() -> None:
    machine = Machine(kernel=40.0, host=10.0)
    store = machine.store(table())
    with machine.pipeline(store) as reading, machine.pipeline(store, writable=True) as writing:
        assert reading._parts is not None
        assert writing._parts is not None
        learnt = go_on(reading._parts.movers, None)
        read_all(reading)
        [[before]], [[after]] = learnt, go_on(writing._parts.movers, learnt)
        assert before is not None
        assert before.reading.settled
        assert after is not None
        assert not after.reading.settled


def test_pipelines_that_are_live_together_do_not_judge_for_each_other() -> None:
    machine = Machine(kernel=40.0, host=10.0)
    store = machine.store(table())
    with machine.pipeline(store) as one, machine.pipeline(store) as other:
        assert one._parts is not None
        assert other._parts is not None
        learnt = go_on(one._parts.movers, None)
        read_all(one)
        why = one.stats().mover_why
        go_on(other._parts.movers, learnt)
        assert other.stats().mover_why == why
        machine.kernel = 1.0
        read_all(other)
        assert other.stats().mover == "copy"
        assert one.stats().mover_why == why


def test_what_was_learnt_is_not_forgotten_for_a_pipeline_that_has_no_choice() -> None:
    machine = Machine(kernel=40.0, host=10.0)
    store = machine.store(table())
    with machine.pipeline(store) as free, machine.pipeline(store, mover="copy") as bound:
        assert free._parts is not None
        assert bound._parts is not None
        learnt = go_on(free._parts.movers, None)
        assert go_on(bound._parts.movers, learnt) == learnt


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
    for index in random_batches():
        plain[np.unique(index)] += 1
    assert torch.equal(memory, plain)
    assert f"; writing: {taken}: " in stats.mover_why
    assert machine.moved["scattered"]
    assert machine.moved["drain on writer"] or machine.moved["copy on writer"]


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


def test_where_values_that_become_inf_are_counted_the_device_casts() -> None:
    machine = Machine(kernel=2.0, host=1_000.0, engine=2.0)
    with machine.pipeline(
        machine.store(table(dtype=torch.float64) * 1e5), dtype=torch.float16, count_inf=True, mover="auto"
    ) as pipe:
        read_all(pipe)
        assert "cast on the host" not in pipe.stats().mover_why
        assert (pipe.stats().values_made_inf or 0) > 0


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


# ---- a mover that becomes possible -------------------------------------------------------------------------------


class FromTheSecondEpochOn:
    """A file that must be read once before a kernel may read it."""

    def __init__(self, mover: Mover) -> None:
        self.reason = ""
        self._mover = mover

    def join(self) -> Mover | None:
        if not self.reason:
            self.reason = "the file is cold"
            return None
        return self._mover


def test_a_mover_that_becomes_possible_joins_when_an_epoch_begins_and_is_tried() -> None:
    machine, memory = Machine(kernel=40.0, host=10.0), table()
    with machine.pipeline(machine.store(memory), mover="copy") as pipe:
        assert pipe._parts is not None
        store, movers = pipe._source.stores[0], pipe._parts.movers[0]
        later = FromTheSecondEpochOn(make_mover("zero-copy", store, machine.device, 1))
        alone = Chosen(
            machine.device,
            list(movers),
            store.row_nbytes,
            lambda names, what: Trial(names, settled=list[str]().append),
            writes=0,
            later=later,
        )
        movers[0] = alone  # type: ignore[index]  # a list
        read_all(pipe)
        assert machine.moved["fetch on fetch"] == 0
        assert pipe.stats().mover_why.endswith("; the file is cold")
        assert all(torch.equal(rows, memory[index]) for index, rows in read_all(pipe))
        assert pipe.stats().mover_why.startswith("zero-copy: 40 GB/s against ")
