"""The account of time on a real GPU: its clock is the host's, nothing waits for it, and what limits is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.pipeline._clock import Clock
from rowferry.stores._devices import CudaDevice

pytestmark = pytest.mark.gpu

CYCLES = 1_500_000_000  # a second of torch.cuda._sleep, more or less
ROWS, BATCH = 1_000_000, 65_536


@pytest.fixture(scope="module")
def store() -> rf.PinnedStore:
    return rf.PinnedStore.from_array(np.arange(ROWS * 128, dtype=np.float32).reshape(ROWS, 128))


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, ROWS, BATCH) for _ in range(count)]


def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))


def test_the_clock_of_the_device_is_the_hosts() -> None:
    cuda = device()
    clock = Clock(cuda)
    early = clock.mark(cuda.current())
    torch.cuda.synchronize()
    anchored = clock.now()
    clock.ready()
    torch.cuda.synchronize()
    slack = clock.now() - anchored + 1e-3  # so late the anchor itself may be, where other processes use the card
    assert clock.ready()
    before = clock.now()
    event = clock.mark(cuda.current())
    event.synchronize()
    after = clock.now()
    assert before - slack < clock.at(event) < after + 1e-3
    torch.cuda._sleep(CYCLES // 20)
    late = clock.mark(cuda.current())
    launched = clock.now()
    late.synchronize()
    assert launched - slack < clock.at(late) < clock.now() + 1e-3
    assert clock.at(early) < clock.at(event) < clock.at(late)  # also of an event before the anchor


def test_the_link_is_measured_once_and_is_what_a_large_copy_reaches() -> None:
    rate = device().link_rate()
    start = time.perf_counter()
    assert device().link_rate() == rate
    assert time.perf_counter() - start < 1e-3
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    fastest = float("inf")
    for _ in range(100):  # others may use the link: one copy that has it alone is enough
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
        if rate == pytest.approx((1 << 30) / fastest, rel=0.1):
            break
    assert rate == pytest.approx((1 << 30) / fastest, rel=0.1)


def test_a_loop_without_work_is_limited_by_the_link(store: rf.PinnedStore) -> None:
    with rf.Pipeline(store, batch_size=BATCH, shuffle=True, device="cuda", mover="zero-copy", lookahead=4) as pipe:
        for _ in range(6):  # others may use the card: one epoch of its own is enough
            before = pipe.stats()
            for _batch in pipe:
                pass
            stats = pipe.stats().since(before)
            if stats.verdict.startswith("the link limits: 0.") and stats.wait_seconds["link"] > 0.5 * stats.waited:
                break
    assert stats.verdict.startswith("the link limits: 0."), stats.verdict
    assert stats.link_gbps is not None
    assert stats.link_share is not None
    assert 0.1 < stats.link_share < 1.05
    assert stats.wait_seconds["link"] > 0.5 * stats.waited
    assert stats.hidden_share < 0.5
    assert stats.fetch_seconds < stats.seconds * 1.05


def test_a_loop_with_much_work_hides_the_transfer(store: rf.PinnedStore) -> None:
    with rf.Pipeline(store, batch_sampler=batches(60), device="cuda", mover="zero-copy") as pipe:
        for _ in range(4):  # others may use the card: one epoch of its own is enough
            first = None
            for _batch in pipe:
                torch.cuda._sleep(CYCLES // 50)
                if first is None:
                    torch.cuda.synchronize()
                    first = pipe.stats()
            assert first is not None
            part = pipe.stats().since(first)
            if part.hidden_share > 0.95 and part.waited < 0.02 * part.seconds:
                break
    assert part.verdict.startswith("the training limits: "), part.verdict
    assert part.hidden_share > 0.95
    assert part.waited < 0.02 * part.seconds


def test_rows_that_the_kernel_drains_are_counted_when_flush_returns(store: rf.PinnedStore) -> None:
    drained = 0
    with rf.Pipeline(store, batch_sampler=batches(10), device="cuda", mover="zero-copy", writable=True, lookahead=1) as pipe:
        for batch in pipe:
            torch.cuda._sleep(CYCLES // 200)
            batch.write_back()
            drained += len(batch.rows)
            pipe.flush()
            assert pipe.stats().rows_drained == drained
        assert pipe.stats().bytes_drained == 512 * drained


def test_values_made_inf_are_counted_without_waiting() -> None:
    values = torch.full((1_000, 8), 70_000.0)
    with rf.Pipeline(
        rf.PinnedStore.from_array(values.numpy()), batch_size=100, device="cuda", dtype=torch.float16, count_inf=True
    ) as pipe:
        list(pipe)
        assert pipe.stats().values_made_inf == 8_000


def test_nothing_that_tells_the_time_waits_for_the_device(store: rf.PinnedStore, tmp_path: Path) -> None:
    with rf.Pipeline(
        store, batch_sampler=batches(400), device="cuda", dtype=torch.float16, writable=True, count_inf=True
    ) as pipe:
        iterator = iter(pipe)
        for _ in range(40):
            next(iterator).write_back()
        pipe.trace(tmp_path / "t.json", steps=20)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                next(iterator).write_back()
                torch.cuda._sleep(CYCLES // 1000)
                start = time.perf_counter()
                pipe.stats()
                assert time.perf_counter() - start < 0.02
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_stats_may_be_asked_for_while_a_graph_is_captured(store: rf.PinnedStore) -> None:
    still = torch.zeros(4, device="cuda")
    with rf.Pipeline(store, batch_sampler=batches(20), device="cuda", count_inf=True, dtype=torch.float16) as pipe:
        iterator = iter(pipe)
        next(iterator)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            still.add_(1)
            assert pipe.stats().batches == 1
        graph.replay()
        assert len(list(iterator)) == 19
    assert still.tolist() == [1.0] * 4


def test_a_trace_puts_the_streams_where_the_threads_started_them(store: rf.PinnedStore, tmp_path: Path) -> None:
    with rf.Pipeline(store, batch_sampler=batches(60), device="cuda", writable=True) as pipe:
        pipe.trace(tmp_path / "t.json", steps=40)
        for batch in pipe:
            torch.cuda._sleep(CYCLES // 1000)
            batch.write_back()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [(names[event["pid"], event["tid"]], event) for event in events if event["ph"] == "X"]
    for name in ("consumer thread", "producer thread", "writer thread", "consumer stream", "plan stream", "fetch stream"):
        assert any(track == name for track, _ in spans), name

    def starts(track: str, name: str) -> dict[int, float]:
        return {event["args"]["window"]: event["ts"] for of, event in spans if of == track and event["name"] == name}

    launched, ran = starts("producer thread", "fetch"), starts("fetch stream", "fetch")
    assert len(ran.keys() & launched.keys()) > 3
    assert all(ran[window] > launched[window] - 1_000 for window in ran.keys() & launched.keys())  # microseconds
