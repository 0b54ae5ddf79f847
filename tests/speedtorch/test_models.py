"""Model switchers: rows go out to the slots and come back, whatever the memory they live in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rowferry.speedtorch as SpeedTorch

ROWS, WIDTH = 50, 4
KINDS: dict[str, dict[str, Any]] = {
    "ModelFactory": {},
    "ModelFactory pinned": {"CPUPinn": True},
    "ModelFactoryMM": {"diskname": "table"},
    "ModelFactoryMM pinned": {"diskname": "table", "CPUPinn": True},
    "GPUPytorchModelFactory": {},
    "CPUPytorchModelFactory": {},
    "PytorchModelFactory": {},
    "PytorchModelFactory pinned": {"deviceType": "cpu", "pinType": True},
    "PytorchModelFactory cpu": {"deviceType": "cpu"},
    "PytorchModelFactory both": {"pinType": True},
}


def switcher(kind: str, embedding: nn.Embedding, **more: Any) -> Any:
    return getattr(SpeedTorch, kind.partition(" ")[0])(embedding, ROWS, WIDTH, **{**KINDS[kind], **more})


def embedding_on(device: str) -> nn.Embedding:
    return nn.Embedding(3, WIDTH).to(device)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, folder: Path) -> str:
    return str(request.param)


def test_rows_come_in_slot_order_and_go_back(kind: str, device: str) -> None:
    embedding = embedding_on(device)
    parameter = embedding.weight
    table = switcher(kind, embedding)
    table.uniformDistributionInit(-1.0, 1.0)
    before = table.getNumpyVersion()
    assert before.shape == (ROWS, WIDTH)
    assert before.dtype == np.float32
    assert -1 <= before.min() < before.max() < 1
    positive, negative = np.array([[7, 3], [0, 49]], np.int32), np.array([[5], [11]])
    table.beforeForwardPass(positive, negative)
    assert embedding.weight is parameter
    assert embedding.weight.data.cpu().numpy().tolist() == before[[7, 3, 0, 49, 5, 11]].tolist()
    with torch.no_grad():
        embedding.weight.data.add_(1)
    table.afterOptimizerStep(positive, negative)
    table.beforeForwardPass(np.array([49, 7, 2]))
    assert embedding.weight.data.cpu().numpy().tolist() == [*(before[[49, 7]] + 1).tolist(), before[2].tolist()]
    after = table.getNumpyVersion()
    assert after[[7, 3, 0, 49, 5, 11]].tolist() == (before[[7, 3, 0, 49, 5, 11]] + 1).tolist()
    assert np.delete(after, [7, 3, 0, 49, 5, 11], 0).tolist() == np.delete(before, [7, 3, 0, 49, 5, 11], 0).tolist()


def test_each_init_fills_every_row_and_may_be_called_again(kind: str, device: str) -> None:
    table = switcher(kind, embedding_on(device))
    torch.manual_seed(0)
    table.normalDistributionInit(5.0, 0.1)
    assert 4 < table.getNumpyVersion().min() < table.getNumpyVersion().max() < 6
    table.zerosInit()
    assert not table.getNumpyVersion().any()
    if hasattr(table, "customInit"):
        table.customInit(nn.init.uniform_, 2.0, 3.0)
        assert (table.getNumpyVersion() >= 2).all()


def test_of_a_row_in_several_slots_the_last_is_kept(kind: str, device: str) -> None:
    embedding = embedding_on(device)
    table = switcher(kind, embedding)
    table.zerosInit()
    index = np.array([4, 9, 4, 9, 4])
    for _ in range(5):
        table.beforeForwardPass(index)
        embedding.weight.data.copy_(torch.arange(5.0)[:, None].expand(5, WIDTH))
        table.afterOptimizerStep(index)
        assert table.getNumpyVersion()[[4, 9], 0].tolist() == [4, 3]


def test_a_row_out_of_range_is_refused_and_nothing_is_written(kind: str, device: str) -> None:
    embedding = embedding_on(device)
    table = switcher(kind, embedding)
    with pytest.raises(RuntimeError, match="holds nothing yet"):
        table.beforeForwardPass(np.array([1]))
    table.zerosInit()
    with pytest.raises(IndexError, match="row 50 is out of range"):
        table.beforeForwardPass(np.array([0, ROWS]))
    embedding.weight.data = torch.ones(2, WIDTH, device=embedding.weight.device)
    with pytest.raises(IndexError, match="row 50 is out of range"):
        table.afterOptimizerStep(np.array([0, ROWS]))
    with pytest.raises(ValueError, match="shape"):
        table.afterOptimizerStep(np.array([0, 1, 2]))
    assert not table.getNumpyVersion().any()


@pytest.mark.parametrize("dtype", ["float16", np.float64, np.dtype("float32"), torch.float64, "bfloat16"])
def test_a_dtype_may_be_a_string_or_numpys_or_torchs(dtype: Any, device: str, folder: Path) -> None:
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, getattr(dtype, "__name__", str(dtype)))
    for kind in KINDS:
        if kind.startswith("ModelFactory") and dtype == "bfloat16":
            continue  # has no array in NumPy, nor a .npy that says so
        embedding = embedding_on(device)
        table = switcher(kind, embedding, datatype=dtype)
        table.uniformDistributionInit(0, 1)
        table.beforeForwardPass(np.array([1, 2]))
        assert embedding.weight.dtype == wanted
        assert table.datatype is dtype
    with pytest.raises(TypeError, match="no dtype like"):
        switcher("ModelFactory", embedding_on(device), datatype="U8")


def test_variable_transformer_gives_numpy_slot_numbers() -> None:
    table = switcher("ModelFactory", nn.Embedding(1, WIDTH))
    alone = table.variableTransformer(3, 2)
    assert (alone.tolist(), alone.dtype) == ([[0, 1], [2, 3], [4, 5]], np.int64)
    positive, negative = table.variableTransformer(2, 1, 3)
    assert (positive.tolist(), negative.tolist()) == ([[0], [1]], [[2, 3, 4], [5, 6, 7]])


def test_indexes_may_be_mutated_between_the_calls(device: str) -> None:
    embedding = embedding_on(device)
    table = switcher("ModelFactory pinned", embedding)
    table.zerosInit()
    index = np.array([1, 2])
    table.beforeForwardPass(index)
    embedding.weight.data.fill_(3)
    table.afterOptimizerStep(index)
    index[:] = 0
    assert table.getNumpyVersion()[:, 0].nonzero()[0].tolist() == [1, 2]


def test_other_kinds_of_index_are_taken(device: str) -> None:
    embedding = embedding_on(device)
    table = switcher("GPUPytorchModelFactory", embedding)
    table.customInit(lambda rows: rows.copy_(torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)))
    for index in ([3, 1], torch.tensor([3, 1], device=device), range(3, 0, -2), (3, 1)):
        table.beforeForwardPass(index, torch.tensor([[-1]], device=device))
        assert embedding.weight.data[:, 0].tolist() == [3, 1, 49]


# ---- attributes and files -------------------------------------------------------------------------------------------


def test_the_arrays_that_scripts_read_are_the_rows_themselves(kind: str, device: str) -> None:
    table = switcher(kind, embedding_on(device))
    table.zerosInit()
    names = {"MM": "CUPYmemmap", "CPU": "pytorchCPUVar", "GPU": "pytorchGPUVar", "Pyt": "pytorchGPUVar", "Mod": "CUPYcorpus"}
    name = names["MM"] if "MM" in kind else names[kind[:3]]
    seen = getattr(table, name)
    assert seen.shape == (ROWS, WIDTH)
    assert str(seen.device)
    seen[3] = 7
    if device == "cuda":
        torch.cuda.synchronize()
    assert table.getNumpyVersion()[3].tolist() == [7] * WIDTH
    again = table.getTorchVar() if hasattr(table, "getTorchVar") else table.getCupyVar()
    assert again.shape == seen.shape


def test_a_saved_table_is_loaded_into_the_same_kind_of_memory(kind: str, device: str, folder: Path) -> None:
    table, other = switcher(kind, embedding_on(device)), switcher(kind, embedding_on(device))
    table.uniformDistributionInit(0, 1)
    if hasattr(table, "saveTorch"):
        table.saveTorch("table.pt")
        loaded = torch.load("table.pt", weights_only=True, map_location="cpu")
        assert loaded.tolist() == table.getNumpyVersion().tolist()
        torch.save(loaded, "old.pt", _use_new_zipfile_serialization=False)
        other.loadTorch("old.pt")
        assert other.getNumpyVersion().tolist() == table.getNumpyVersion().tolist()
        other.loadTorch("table.pt")
    else:
        table.saveCupy("table.cpy")
        assert np.load(folder / "table.cpy.npy").tolist() == table.getNumpyVersion().tolist()
        (folder / "table.cpy.npy").rename("exact name")
        other.loadCupy("exact name")
    assert other.getNumpyVersion().tolist() == table.getNumpyVersion().tolist()
    assert [type(store) for store in other._stores.values()] == [type(store) for store in table._stores.values()]


def test_memmaps_are_files_of_the_next_free_number(folder: Path, device: str) -> None:
    tables = [switcher("ModelFactoryMM", embedding_on(device)) for _ in range(2)]
    for table in tables:
        table.uniformDistributionInit(1, 2)
    assert sorted(path.name for path in folder.glob("*.npy")) == ["table0.memmap.cpy.npy", "table1.memmap.cpy.npy"]
    embedding = tables[0].model_variable
    tables[0].beforeForwardPass(np.array([30]))
    embedding.weight.data.fill_(9)
    tables[0].afterOptimizerStep(np.array([30]))
    del table, tables
    found = np.load("table0.memmap.cpy.npy")
    assert found[30].tolist() == [9] * WIDTH
    assert (np.delete(found, 30, 0) >= 1).all()
