"""Where the time of a run went, on a simulated device with simulated time: every number can be worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rowferry.pipeline import Pipeline, Stats
from rowferry.pipeline.testing._host import SimulatedHost
from rowferry.pipeline.testing._timed_host import TimedHost
from rowferry.stores import ArrayStore
from rowferry.stores.testing import CostlyStore, SimulatedDevice

LINK = 50e9
ZERO_COPY = 0.9  # of it
ROWS, WIDTH = 4096, 64
BATCH = 256
BATCH_SECONDS = BATCH * WIDTH * 4 / (ZERO_COPY * LINK)  # of its fetch


def work_takes(train: float) -> Callable[[str, str, int], float]:
    """Only transfers and the training take time."""

    def cost(stream: str, name: str, nbytes: int) -> float:
        del stream
        if name == "train":
            return train
        return {"fetch": nbytes / (ZERO_COPY * LINK), "drain": nbytes / (ZERO_COPY * LINK), "copy": nbytes / LINK}.get(
            name, 0.0
        )

    return cost


class Loop:
    """A pipeline over disjoint batches, and a training that takes ``train`` seconds a batch on the device."""

    def __init__(self, *, train: float, store: Any = None, batches: Any = None, lanes: int = 1, **keywords: Any) -> None:
        self.device = SimulatedDevice(free_bytes=64 << 20)
        self.device.link = LINK
        self.device.cost = work_takes(train)
        source = ArrayStore(torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH))
        self.pipe = Pipeline(
            store(source, self.device) if store else source,
            batch_sampler=batches(self.device) if batches else disjoint(),
            device=self.device,  # type: ignore[arg-type]  # a simulated device is taken as it is
            **{
                "lookahead": 4,
                "depth": 2,
                "staging_bytes": 1 << 20,
                "mover": "copy" if store else "zero-copy",
                **keywords,
            },
        )
        if keywords.get("lookahead") != 0:
            self.pipe._new_host = lambda: TimedHost(self.device, lanes)

    def run(self) -> Stats:
        """All batches; what happened after the first window, which nothing can hide."""
        first = None
        for batch in self.pipe:
            rows = batch.values if self.pipe._settings.writable else batch.data
            self.device.launch("train", lambda: None, reads=[rows])
            if self.pipe._settings.writable:
                batch.write_back()
            if first is None:
                self.device.drain()
                first = self.pipe.stats()
        assert first is not None
        stats = self.pipe.stats()
        self.pipe.close()
        assert stats.batches == ROWS // BATCH
        return stats.since(first)


def disjoint() -> list[np.ndarray[Any, Any]]:
    return list(np.random.default_rng(0).permutation(ROWS).reshape(-1, BATCH))  # ranges would cross as plain copies


def test_a_run_that_the_link_limits_says_what_share_of_it_is_reached() -> None:
    stats = Loop(train=BATCH_SECONDS / 4).run()
    assert stats.verdict.startswith("the link limits: 0.90 of 50.0 GB/s; windows of 3 batches hide 25 % of it")
    assert set(stats.wait_seconds) == {"link", "cold start"}
    assert stats.fetch_gbps == pytest.approx(45.0)
    assert stats.link_share == pytest.approx(0.9)
    assert stats.fetch_seconds == pytest.approx(15 * BATCH_SECONDS)


def test_what_training_and_transfer_take_together_is_waited_for_or_hidden() -> None:
    stats = Loop(train=BATCH_SECONDS / 4).run()
    assert stats.exposed_seconds == pytest.approx(stats.wait_seconds["link"])
    assert stats.hidden_share == pytest.approx(1 - stats.wait_seconds["link"] / stats.fetch_seconds)


def test_a_training_that_takes_longer_than_the_transfer_hides_all_of_it() -> None:
    stats = Loop(train=BATCH_SECONDS * 4).run()
    assert stats.hidden_share == 1.0
    assert stats.waited == pytest.approx(0.0)
    assert stats.verdict.startswith("the training limits: it waited 0.0 % of ")
    assert stats.verdict.endswith("windows of 3 batches hide 100 % of it")


@pytest.mark.parametrize("lookahead", [0, 4])
def test_a_training_that_takes_no_time_hides_nothing(lookahead: int) -> None:
    stats = Loop(train=0.0, lookahead=lookahead).run()
    assert stats.hidden_share == pytest.approx(0.0, abs=1e-9)
    assert stats.wait_seconds["link"] == pytest.approx(stats.fetch_seconds)


def slow_batches(device: SimulatedDevice) -> Any:
    class Sampler:
        def __iter__(self) -> Iterator[Any]:
            for batch in disjoint():
                device.spend(5 * BATCH_SECONDS)
                yield batch

    return Sampler()


def test_a_slow_sampler_is_named() -> None:
    stats = Loop(train=BATCH_SECONDS, batches=slow_batches).run()
    assert stats.verdict.startswith("the sampler limits: ")
    assert stats.wait_seconds["sampler"] > 0.7 * stats.waited  # the fetch of what was sampled is waited for too


def test_a_store_that_is_not_memory_is_named_as_such() -> None:
    def store(inner: Any, device: SimulatedDevice) -> Any:
        return CostlyStore(inner, read=lambda nbytes: device.spend(nbytes / 1e9))

    stats = Loop(train=BATCH_SECONDS, store=store).run()
    assert stats.verdict.startswith("the store limits: ")
    assert stats.fetch_gbps == pytest.approx(1.0, rel=0.05)


def gathered_at(rate: float) -> Callable[[Any, SimulatedDevice], Any]:
    return lambda inner, device: CostlyStore(inner, read=lambda nbytes: device.spend(nbytes / rate), in_memory=True)


def test_host_threads_that_gather_slowly_are_named() -> None:
    stats = Loop(train=BATCH_SECONDS, store=gathered_at(5e9), mover="copy").run()
    assert stats.verdict.startswith("the host's gather limits: ")
    assert "of the link's 50.0" in stats.verdict


def test_host_threads_that_keep_up_leave_the_limit_to_the_link() -> None:
    stats = Loop(train=BATCH_SECONDS / 4, store=gathered_at(1e15), mover="copy").run()
    assert stats.verdict.startswith("the link limits: 1.00 of 50.0 GB/s")


def test_a_slow_way_back_is_named_and_a_third_slot_advised() -> None:
    def store(inner: Any, device: SimulatedDevice) -> Any:
        return CostlyStore(inner, write=lambda nbytes: device.spend(nbytes / 1e9), in_memory=True)

    stats = Loop(train=BATCH_SECONDS, store=store, mover="copy", writable=True).run()
    assert stats.verdict.startswith("the drain limits: ")
    assert stats.verdict.endswith("depth=3 lets drains and fetches overlap")
    assert stats.drain_gbps == pytest.approx(1.0, rel=0.05)


def test_a_single_window_is_a_cold_start() -> None:
    loop = Loop(train=BATCH_SECONDS, batches=lambda device: disjoint()[:1])
    for batch in loop.pipe:
        loop.device.launch("train", lambda: None, reads=[batch.data])
    stats = loop.pipe.stats()
    assert set(stats.wait_seconds) == {"cold start"}
    assert stats.wait_seconds["cold start"] == pytest.approx(BATCH_SECONDS, rel=0.05)  # and the plan's
    loop.pipe.close()


# ---- counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_kernels_drain_are_counted_when_flush_returns(seed: int) -> None:
    device = SimulatedDevice(seed)
    memory = torch.zeros(32, 2)
    pipe = Pipeline(
        {"w": ArrayStore(memory), "m": ArrayStore(torch.zeros(32, 3))},
        batch_sampler=[[0, 1, 2], [3, 3], [4, 5, 6, 7]],
        device=device,  # type: ignore[arg-type]
        mover="zero-copy",
        writable=True,
        lookahead=1,
        staging_bytes=1 << 14,
    )
    host = SimulatedHost(device, seed)
    pipe._new_host = lambda: host
    drained = 0
    with pipe:
        for batch in pipe:
            batch.write_back({"w": batch.values["w"]})
            drained += len(batch.rows)
            pipe.flush()
            stats = pipe.stats()
            assert (stats.rows_drained, stats.bytes_drained) == (drained, 8 * drained)
            host.pause()
    assert pipe.stats().drains == 3
    assert device.races == []


def test_bytes_follow_rows_from_what_was_asked_to_what_crossed() -> None:
    asked = [[0, 0, 1], [1, 2]] * 6
    loop = Loop(train=0.0, batches=lambda device: [np.array(rows) for rows in asked], lookahead=2)
    list(loop.pipe)
    stats = loop.pipe.stats()
    loop.pipe.close()
    row = WIDTH * 4
    assert (stats.rows, stats.bytes) == (5 * 6, 5 * 6 * row)
    assert stats.bytes_distinct == stats.rows_distinct * row
    assert stats.bytes_carried == stats.rows_carried * row
    assert stats.bytes_fetched == stats.rows_fetched * row
    assert stats.rows_fetched + stats.rows_carried == stats.rows_distinct < stats.rows


def test_plans_are_held_while_they_are_under_way() -> None:
    loop = Loop(train=BATCH_SECONDS)
    held = [loop.pipe.stats().bytes_plans for _ in loop.pipe]
    assert min(held[:-1]) > BATCH * 8  # at least the places of a batch
    assert loop.pipe.stats().bytes_plans == 0
    loop.pipe.close()


def test_a_part_of_a_run_is_what_was_counted_after_an_earlier_snapshot() -> None:
    loop = Loop(train=BATCH_SECONDS)
    list(loop.pipe)
    first = loop.pipe.stats()
    list(loop.pipe)
    whole = loop.pipe.stats()
    loop.pipe.close()
    part = whole.since(first)
    assert (part.batches, part.rows_fetched) == (first.batches, first.rows_fetched)
    assert part.waited == pytest.approx(whole.waited - first.waited)
    assert (part.bytes_staging, part.mover, part.depth) == (whole.bytes_staging, whole.mover, whole.depth)


def test_each_epoch_says_once_what_limited_it(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(train=BATCH_SECONDS / 4)
    with caplog.at_level("INFO", logger="rowferry"), loop.pipe:
        for _epoch in range(2):
            for batch in loop.pipe:
                loop.device.launch("train", lambda: None, reads=[batch.data])
        next(iter(loop.pipe))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch ")]
    assert [line.partition(":")[0] for line in said] == ["epoch 0", "epoch 1", "epoch 2"]
    assert said[1].startswith("epoch 1: the link limits: 0.90 of 50.0 GB/s; windows of 3 batches hide ")
