"""The pipeline on a real GPU: the same rows and bytes as on the CPU, ordered without a word from the user."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.pipeline.testing._judges import PAIRS, set_movers

pytestmark = pytest.mark.gpu

MOVERS = (*PAIRS, "changing")


def random_batches(seed: int, rows: int, count: int = 60) -> list[Any]:
    rng = np.random.default_rng(seed)
    kind = seed % 3
    if kind == 0:
        return [rng.integers(0, rows, rng.integers(0, 40)) for _ in range(count)]
    if kind == 1:
        return [np.arange(7) for _ in range(count)]
    return [np.minimum(rng.zipf(1.2, 30) - 1, rows - 1) for _ in range(count)]


def sleepy(streams: list[Any], number: int) -> None:
    """Keep the stream busy, so that what is not ordered comes too late."""
    if number % 3 == 0:
        torch.cuda._sleep(1_000_000)
    del streams


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("lookahead", [0, 1, 3, 16])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_batch_and_the_store_equal_the_plain_loop(mover: str, lookahead: int, depth: int) -> None:
    for seed in range(3):
        batches = random_batches(seed, 200)
        store = rf.PinnedStore.zeros((200, 3), torch.float32)
        wanted = torch.zeros(200, 3)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        staging = 12_000 * (1 if lookahead == 0 else depth)
        with rf.Pipeline(
            store, batch_sampler=batches, writable=True, lookahead=lookahead, depth=depth, device="cuda", staging_bytes=staging
        ) as pipe:
            set_movers(pipe, mover, seed)
            iterator = iter(pipe)
            for number, index in enumerate(batches):
                with torch.cuda.stream(streams[number % 2 if seed else 0]):
                    batch = next(iterator)
                    sleepy(streams, number)
                    rows = torch.from_numpy(np.unique(index))
                    assert torch.equal(batch.rows.cpu(), rows)
                    assert torch.equal(batch.values.cpu(), wanted[rows]), f"batch {number}, seed {seed}"
                    assert torch.equal(batch.rows[batch.inverse].cpu(), torch.from_numpy(index))
                    if number % 5 == 3:
                        continue
                    sleepy(streams, number + 1)
                    new = batch.values + number
                    batch.write_back(new)
                    del new
                    torch.full_like(batch.values, -1.0)  # may take the memory of what was just dropped
                    wanted[rows] += number
                    if number == 17:
                        pipe.flush()
                        assert torch.equal(store.torch(), wanted)
            pipe.flush()
            assert torch.equal(store.torch(), wanted)


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
def test_a_shuffled_epoch_is_the_same_on_cpu_and_gpu(mover: Any) -> None:
    table = torch.randn(5_000, 7)
    store = rf.PinnedStore.from_array(table)
    with rf.Pipeline(table, batch_size=77, shuffle=True, seed=3, device="cpu") as pipe:
        wanted = [(batch.index, batch.data) for batch in pipe]
    with rf.Pipeline(store, batch_size=77, shuffle=True, seed=3, device="cuda", mover=mover) as pipe:
        found = list(pipe)  # kept batches never change
    assert len(found) == len(wanted)
    for batch, (index, rows) in zip(found, wanted, strict=True):
        assert torch.equal(batch.index.cpu(), index)
        assert torch.equal(batch.data.cpu(), rows)


def test_rows_in_files_reach_the_gpu(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3_000, 5)).astype(">f8")
    np.save(tmp_path / "x.npy", rows)
    zarr = rf.create_store(tmp_path / "y.zarr", (3_000, 2), torch.int64)
    zarr.scatter(range(3_000), torch.arange(6_000).view(3_000, 2))
    zarr.close()
    with rf.Pipeline({"x": tmp_path / "x.npy", "y": tmp_path / "y.zarr"}, batch_size=128, shuffle=True, device="cuda") as pipe:
        for batch in pipe:
            assert np.array_equal(batch["x"].cpu().numpy(), rows[batch.index.cpu().numpy()])
            assert torch.equal(batch["y"][:, 0], batch.index * 2)


def test_rows_on_the_device_are_served_and_written_there() -> None:
    store = rf.DeviceStore.from_array(torch.zeros(50, 2), device="cuda")
    with rf.Pipeline(store, batch_sampler=[[1, 1, 4], [4, 5]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
        pipe.flush()
    assert store.gather([1, 4, 5, 6])[:, 0].tolist() == [1.0, 2.0, 1.0, 0.0]


def test_casts_have_the_same_bits_on_both(tmp_path: Path) -> None:
    special = [65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11, float("nan"), -0.0, 1e-300]
    wide = torch.tensor(special * 100, dtype=torch.float64).view(-1, 10)
    for source in (wide, wide.to(torch.float32)):
        batches = []
        for device, store in (("cpu", source), ("cuda", rf.PinnedStore.from_array(source))):
            with rf.Pipeline(store, batch_size=10, device=device, dtype=torch.float16) as pipe:
                batches.append(torch.cat([batch.data.cpu() for batch in pipe]))
        number = ~batches[0].isnan()
        assert torch.equal(batches[0].isnan(), batches[1].isnan())
        assert torch.equal(batches[0].view(torch.int16)[number], batches[1].view(torch.int16)[number])


def test_items_travel_with_their_rows() -> None:
    store = rf.PinnedStore.from_array(torch.arange(100.0).view(100, 1))
    items = [
        {
            "rows": torch.tensor([k, 99 - k]),
            "label": torch.full((4,), k),
            "on": torch.full((2,), k, device="cuda"),
            "name": "n",
        }
        for k in range(50)
    ]
    with rf.Pipeline(store, batch_sampler=items, index="rows", device="cuda") as pipe:
        for k, batch in enumerate(pipe):
            torch.cuda._sleep(200_000)
            assert batch.item["label"].is_cuda
            assert batch.item["label"].tolist() == [k] * 4
            assert batch.item["on"].tolist() == [k] * 2
            assert batch.item["name"] == "n"
            assert batch.data[:, 0].tolist() == [k, 99 - k]


def test_indices_on_the_gpu_are_checked_there_and_wrap() -> None:
    store = rf.PinnedStore.from_array(torch.arange(10.0).view(10, 1))
    good = torch.tensor([[0, -1], [3, -10]], device="cuda")
    with rf.Pipeline(store, batch_sampler=[good, torch.tensor([1, 10], device="cuda")], device="cuda") as pipe:
        iterator = iter(pipe)
        assert next(iterator).data[..., 0].tolist() == [[0.0, 9.0], [3.0, 0.0]]
        with pytest.raises(IndexError, match="row 10 is out of range for batch 1"):
            next(iterator)
    assert torch.ones(3, device="cuda").sum().item() == 3  # the context is usable


def test_a_side_stream_that_reads_late_keeps_its_batch() -> None:
    store = rf.PinnedStore.from_array(torch.arange(4_096.0).view(4_096, 1).expand(4_096, 64).contiguous())
    side = torch.cuda.Stream()
    sums = []
    with rf.Pipeline(store, batch_sampler=[np.full(512, k) for k in range(64)], device="cuda") as pipe:
        for batch in pipe:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(300_000)
                sums.append(batch.data.sum())
            batch.data.record_stream(side)
            del batch
            torch.full((512, 64), -1.0, device="cuda")
    side.synchronize()
    assert [float(total) for total in sums] == [512.0 * 64 * k for k in range(64)]


def test_the_allocator_comes_to_rest() -> None:
    store = rf.PinnedStore.zeros((20_000, 16), torch.float32)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 20_000, rng.integers(900, 1_100)) for _ in range(1_000)]
    with rf.Pipeline(
        store, batch_sampler=batches, writable=True, device="cuda", staging_bytes=8 << 20, lookahead=16
    ) as pipe:  # so that windows have long stopped growing at the half
        for number, batch in enumerate(pipe):
            batch.write_back(batch.values + 1)
            if number == 500:
                held, pinned = torch.cuda.memory_reserved(), pipe.stats().bytes_pinned
    assert torch.cuda.memory_reserved() <= held * 1.02
    assert pipe.stats().bytes_pinned <= 1.5 * pinned


def test_a_graph_is_captured_beside_a_running_pipeline() -> None:
    store = rf.PinnedStore.zeros((1 << 16, 128), torch.float32)
    with rf.Pipeline(store, batch_size=1_024, shuffle=True, device="cuda", lookahead=2) as pipe:
        iterator = iter(pipe)
        first = next(iterator)
        still = torch.zeros_like(first.data)
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                still.mul_(2).add_(1)
                with pytest.raises(RuntimeError, match="captured"):
                    next(iterator)
                with pytest.raises(RuntimeError, match=r"batch\.index"):
                    first.index.sum()
            graph.replay()
            batch = next(iterator)
            assert batch.data.shape == (1_024, 128)
        assert first.index.unique().numel() == 1_024


def test_an_existing_loader_is_prefetched() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(300, 4), torch.arange(300))
    for pin in (False, True):
        loader = torch.utils.data.DataLoader(data, batch_size=32, pin_memory=pin)
        ferried = rf.prefetch(loader, device="cuda", dtype=torch.float16)
        for _ in range(2):
            for (x, y), (wanted_x, wanted_y) in zip(ferried, loader, strict=True):
                torch.cuda._sleep(100_000)
                assert x.dtype == torch.float16
                assert torch.equal(x.cpu(), wanted_x.half())
                assert torch.equal(y.cpu(), wanted_y)


def test_the_default_device_and_a_dropped_iterator_leave_nothing_behind() -> None:
    store = rf.PinnedStore.zeros((10_000, 8), torch.float32)
    with rf.Pipeline(store, batch_size=100, staging_bytes=1 << 20) as pipe:
        assert pipe.stats().device == "cuda:0"
        for _ in range(5):
            for _batch in itertools.islice(pipe, 3):
                pass


def endless(store: rf.PinnedStore) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, len(store), 4_096)


def test_the_step_never_waits_for_the_device() -> None:
    """No hidden synchronization in next() and write_back()."""
    store = rf.PinnedStore.zeros((100_000, 32), torch.float32)
    with rf.Pipeline(store, batch_sampler=endless(store), writable=True, device="cuda") as pipe:
        iterator = iter(pipe)
        for _ in range(20):
            batch = next(iterator)
            batch.write_back(batch.values)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                batch = next(iterator)
                batch.write_back(batch.values.add_(1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
