"""On a GPU: calls are on the current stream, the host goes on at once, and rows that were written are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rowferry.speedtorch as SpeedTorch

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 5000, 32
MODELS: dict[str, Callable[[Any], Any]] = {
    "cuda": lambda embedding: SpeedTorch.ModelFactory(embedding, ROWS, WIDTH),
    "pinned": lambda embedding: SpeedTorch.ModelFactory(embedding, ROWS, WIDTH, CPUPinn=True),
    "torch cuda": lambda embedding: SpeedTorch.GPUPytorchModelFactory(embedding, ROWS, WIDTH),
    "torch pinned": lambda embedding: SpeedTorch.CPUPytorchModelFactory(embedding, ROWS, WIDTH),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def started(make: Callable[[Any], Any]) -> tuple[Any, nn.Embedding]:
    """A switcher whose kernels are loaded."""
    embedding = nn.Embedding(1, WIDTH).cuda()
    table = make(embedding)
    table.zerosInit()
    for _ in range(2):
        table.beforeForwardPass(np.arange(600))
        table.afterOptimizerStep(np.arange(600))
        table.beforeForwardPass(np.arange(700))
    torch.cuda.synchronize()
    return table, embedding


@every_model
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_what_one_step_wrote_the_next_reads_and_the_host_does_not_wait(make: Callable[[Any], Any], side: bool) -> None:
    pytest.importorskip("cupy")
    table, embedding = started(make)
    rng = np.random.default_rng(0)
    plain = np.zeros((ROWS, WIDTH), np.float32)
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        torch.cuda._sleep(100_000_000)  # so that the pools of memory fill as below
        kept = []
        for _ in range(6):
            table.beforeForwardPass(np.arange(600))
            kept.append(embedding.weight.data.clone())
            embedding.weight.data.add_(0)
            table.afterOptimizerStep(np.arange(600))
        torch.cuda.current_stream().synchronize()
        del kept
        torch.cuda._sleep(600_000_000)
        start = time.perf_counter()
        seen = []
        for number in range(1, 6):
            index = rng.integers(0, 900, 600)
            table.beforeForwardPass(index)
            seen.append((embedding.weight.data.clone(), plain[index]))
            embedding.weight.data.add_(number)
            table.afterOptimizerStep(index)
            plain[index] += number  # of a repeated row once, as its slots hold the same
        took = time.perf_counter() - start
        for found, wanted in seen:
            assert np.array_equal(found.cpu().numpy(), wanted)
    assert took < 0.2
    assert np.array_equal(table.getNumpyVersion(), plain)


@every_model
def test_no_call_waits_for_the_device(make: Callable[[Any], Any]) -> None:
    pytest.importorskip("cupy")
    table, embedding = started(make)
    model = nn.ModuleDict({"e": embedding})
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    state = SpeedTorch.OptimizerFactory(optimizer, ROWS, WIDTH, model, "e", CPUPinn=True)
    state.optInit()
    index = np.random.default_rng(0).integers(0, ROWS, 600)
    for turn in range(3):
        try:
            if turn:
                torch.cuda.set_sync_debug_mode("error")
            table.beforeForwardPass(index)
            state.beforeForwardPass(index)
            optimizer.zero_grad()
            embedding.weight.square().sum().backward()
            optimizer.step()
            table.afterOptimizerStep(index)
            state.afterOptimizerStep(index)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_other_threads_and_their_streams_are_unaffected() -> None:
    tables = [started(make) for make in MODELS.values()]
    failed: list[Any] = []

    def work(number: int) -> None:
        table, embedding = tables[number]
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(1, 30):
                index = np.random.default_rng(turn).permutation(ROWS)[:500]
                table.beforeForwardPass(index)
                embedding.weight.data.fill_(turn)
                table.afterOptimizerStep(index)
                table.beforeForwardPass(index)
                if not bool((embedding.weight.data == turn).all()):
                    failed.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tables))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_a_parameter_on_the_cpu_goes_to_the_gpu_with_its_rows() -> None:
    embedding = nn.Embedding(2, WIDTH)
    table = SpeedTorch.ModelFactory(embedding, ROWS, WIDTH, CPUPinn=True)
    table.zerosInit()
    table.beforeForwardPass(np.array([1]))
    assert embedding.weight.is_cuda
    here = nn.Embedding(2, WIDTH)
    stays = SpeedTorch.PytorchModelFactory(here, ROWS, WIDTH, deviceType="cpu", pinType=True)
    stays.zerosInit()
    stays.beforeForwardPass(np.array([1]))
    assert here.weight.is_cpu
