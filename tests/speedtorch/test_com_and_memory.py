"""Matrices and allocators: thin names for zeros in a kind of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry.speedtorch as SpeedTorch

MATRICES: dict[str, tuple[dict[str, Any], str]] = {
    "COM": ({}, "CUPYCom"),
    "COM pinned": ({"CPUPinn": True}, "CUPYCom"),
    "COMMM": ({}, "CUPYCom"),
    "GPUPytorchCOM": ({}, "pytorchGPUVar"),
    "CPUPytorchCOM": ({}, "pytorchCPUVar"),
    "PytorchCOM": ({}, "pytorchGPUVar"),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_a_matrix_is_zeros_to_count_in_and_is_saved(kind: str, device: str, folder: Path) -> None:
    settings, attribute = MATRICES[kind]
    matrix = getattr(SpeedTorch, kind.partition(" ")[0])(6, **settings)
    matrix.comInit()
    counts = getattr(matrix, attribute)
    assert not matrix.getNumpyVersion().any()
    counts[2, 3] = 5
    if device == "cuda":
        torch.cuda.synchronize()
    found = matrix.getNumpyVersion()
    assert (found.shape, found[2, 3], found.sum()) == ((6, 6), 5, 5)
    assert found.dtype == (np.int32 if "Pytorch" in kind else np.uint32)
    if "Pytorch" in kind:
        matrix.saveTorch("matrix.pt")
        assert torch.load("matrix.pt", weights_only=True)[2, 3].item() == 5
    else:
        matrix.saveCupy("matrix")
        assert np.load("matrix.npy")[2, 3] == 5


@pytest.mark.parametrize("name", ["PMemory", "PMemoryMM"])
def test_memory_has_a_size_and_an_address(name: str, device: str) -> None:
    memory = getattr(SpeedTorch, name)(4096)
    assert memory.size == 4096
    assert memory.ptr == memory.mem.ptr != 0
    assert (memory.device_id == -1) == (not torch.cuda.is_available())
    assert memory.memory.is_pinned() == torch.cuda.is_available()
    del device


@pytest.mark.parametrize("name", ["my_pinned_allocator", "my_pinned_allocatorMM"])
def test_an_allocator_gives_memory(name: str, device: str) -> None:
    pointer = getattr(SpeedTorch, name)(64)
    assert pointer.ptr != 0
    assert pointer.mem.size == 64
    del device


@pytest.mark.gpu
def test_cupy_takes_the_allocator_and_no_switcher_swaps_it() -> None:
    cupy = pytest.importorskip("cupy")
    before = cupy.cuda.get_allocator()
    for kind, (settings, _attribute) in MATRICES.items():
        if kind != "COMMM":
            getattr(SpeedTorch, kind.partition(" ")[0])(6, **settings).comInit()
    table = SpeedTorch.ModelFactory(torch.nn.Embedding(2, 4).cuda(), 9, 4, CPUPinn=True)
    table.uniformDistributionInit(0, 1)
    assert cupy.cuda.get_allocator() == before
    with cupy.cuda.using_allocator(SpeedTorch.my_pinned_allocator):
        array = cupy.zeros((8, 4), cupy.float32)
    array += 1
    assert float(array.sum()) == 32
