"""Streams and lifetimes on a real GPU: what users of loaders have reported as wrong rows, each with a stall to provoke it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.pipeline.testing._judges import PAIRS, set_movers

pytestmark = pytest.mark.gpu

STALL = 80_000_000  # cycles: some 50 ms
SHORT = 200_000


@pytest.mark.parametrize("mover", PAIRS)
def test_what_was_written_behind_a_long_kernel_is_in_memory_when_flush_returns(mover: str) -> None:
    store, wanted = rf.PinnedStore.zeros((64, 8), torch.float32), torch.zeros(64, 8)
    batches = [np.array([number % 64, 7 * number % 64, 5]) for number in range(1000)]
    right = 0
    with rf.Pipeline(store, batch_sampler=batches, writable=True, device="cuda", staging_bytes=1 << 20) as pipe:
        set_movers(pipe, mover, 0)
        for number, batch in enumerate(pipe):
            torch.cuda._sleep(STALL if number % 100 == 99 else SHORT)
            batch.write_back(batch.values + number)
            pipe.flush()
            wanted[np.unique(batches[number])] += number
            right += torch.equal(store.gather(slice(None)), wanted)
    assert right == 1000


@pytest.mark.parametrize("mover", ["copy", "zero-copy"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [3, 5000])  # gathered together, or large enough for pieces of their own
def test_sources_may_change_and_go_while_copies_are_stalled(mover: Any, depth: int, size: int) -> None:
    store = rf.PinnedStore.from_array(torch.arange(100.0).view(100, 1).expand(100, 64).contiguous())
    rows, labels = np.empty(size, np.int64), torch.empty(16)

    def items() -> Iterator[dict[str, Any]]:
        for number in range(40):
            rows[:] = number
            labels.fill_(number)
            yield {"rows": rows, "label": labels[:8], "temporary": torch.full((1000,), number)}

    with rf.Pipeline(
        store, batch_sampler=items(), index="rows", device="cuda", mover=mover, depth=depth, lookahead=2, staging_bytes=1 << 22
    ) as pipe:
        assert pipe._parts is not None
        found = []
        for number, batch in enumerate(pipe):
            if number % 8 == 0:
                for stream in (*pipe._parts.streams.all(), torch.cuda.current_stream()):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(STALL // 4)
            found.append(batch)
    for number, batch in enumerate(found):
        for tensor in (batch.data, batch.index, batch.item["label"], batch.item["temporary"]):
            assert bool((tensor == number).all()), f"batch {number}"


@pytest.mark.parametrize("where", ["default", "own", "changing"])
@pytest.mark.parametrize("size", [4, 40_000])
def test_batches_are_right_on_any_stream_without_a_word_from_the_user(where: str, size: int) -> None:
    store = rf.PinnedStore.from_array(torch.arange(50_000.0).view(-1, 1).expand(-1, 32).contiguous())
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 50_000, size) for _ in range(100)]
    own = [torch.cuda.Stream(), torch.cuda.Stream()]
    sums = []
    with rf.Pipeline(store, batch_sampler=batches, device="cuda", staging_bytes=32 << 20) as pipe:
        iterator = iter(pipe)
        for number in range(len(batches)):
            stream = {"default": None, "own": own[0], "changing": own[number % 2] if number % 3 else None}[where]
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if number % 5 == 0:
                    torch.cuda._sleep(SHORT)
                batch = next(iterator)
                sums.append(batch.data[:, 0].double().sum())
                del batch
                torch.full((size, 32), -1.0, device="cuda")  # may take the memory of what was just dropped
    torch.cuda.synchronize()
    assert [float(total) for total in sums] == [float(index.sum()) for index in batches]


def test_values_of_another_stream_may_be_dropped_as_soon_as_they_were_written_back() -> None:
    store, side = rf.PinnedStore.zeros((4096, 64), torch.float32), torch.cuda.Stream()
    with rf.Pipeline(store, batch_sampler=[np.arange(4096)] * 20, writable=True, device="cuda", staging_bytes=32 << 20) as pipe:
        for number, batch in enumerate(pipe):
            with torch.cuda.stream(side):
                new = torch.full((4096, 64), float(number), device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda._sleep(STALL // 10)
            batch.write_back(new)
            del new
            with torch.cuda.stream(side):
                torch.full((4096, 64), -1.0, device="cuda")
            pipe.flush()
            assert bool((store.torch() == number).all()), f"batch {number}"


ON_ANOTHER_GPU = """
import numpy as np, pynvml, torch
import rowferry as rf

pynvml.nvmlInit()
first = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(first).used
before = used()
with torch.cuda.device(1):
    pinned = rf.PinnedStore.zeros((1000, 16), torch.float32)
for store in (np.zeros((1000, 16), np.float32), pinned):
    for mover in ("auto", "copy"):
        with rf.Pipeline(store, batch_size=100, shuffle=True, device="cuda:1", writable=True, mover=mover) as pipe:
            for batch in pipe:
                assert batch.values.device == batch.rows.device == torch.device("cuda:1")
                batch.write_back(batch.values + 1)
            pipe.flush()
            assert pipe.stats().rows_drained == 1000
with rf.Pipeline(pinned, batch_size=100, device="cuda:1") as pipe:
    assert all(batch.data.device.index == 1 and bool((batch.data == 2).all()) for batch in pipe)
assert [item.device.index for item in rf.prefetch([torch.zeros(3)], device="cuda:1")] == [1]
assert used() - before < 64 << 20, f"{(used() - before) >> 20} MiB on GPU 0, which nobody asked for"
torch.cuda.set_device(0)  # as some trainers do, after the pipeline was made
with rf.Pipeline(pinned, batch_size=100, device="cuda:1") as pipe:
    torch.zeros(1, device="cuda:0")
    assert all(batch.data.device.index == 1 and bool((batch.data == 2).all()) for batch in pipe)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pipeline_for_the_second_gpu_leaves_the_first_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", ON_ANOTHER_GPU]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
