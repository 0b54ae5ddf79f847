"""Data gadgets: any array, any index, from a file or from the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry.speedtorch as SpeedTorch

KINDS = {
    "DataGadget": (SpeedTorch.DataGadget, False),
    "DataGadget pinned": (SpeedTorch.DataGadget, True),
    "DataGadgetMM": (SpeedTorch.DataGadgetMM, False),
    "DataGadgetMM pinned": (SpeedTorch.DataGadgetMM, True),
}
INDEXES: dict[str, Any] = {
    "rows": np.array([3, 0, 3]),
    "int32 in two dimensions": np.array([[3, 0], [1, -1]], np.int32),
    "list": [2, 2],
    "torch": torch.tensor([4, 1]),
    "mask": np.array([True, False, True, False, True]),
    "a row": 2,
    "slice": slice(1, 4),
    "slice with a step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "slices": (slice(None), slice(0, 2)),
    "slices and a number": (slice(1, 3), 1),
    "numbers": (4, 3),
    "ellipsis": (Ellipsis, 1),
    "rows and a slice": (np.array([0, 4]), slice(1, 3)),
    "two arrays": (np.array([0, 4]), np.array([1, 2])),
    "slice and an array": (slice(None), np.array([1, 3])),
    "mask of all": np.arange(20).reshape(5, 4) % 3 == 0,
}


def data(dtype: Any = np.float32) -> Any:
    return np.arange(20).reshape(5, 4).astype(dtype)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, folder: Path) -> Any:
    """``make(array)``: a gadget of a file that holds it."""
    kind, pinned = KINDS[request.param]

    def made(array: Any) -> Any:
        np.save(folder / "data.npy", array)
        return kind("data.npy", CPUPinn=pinned)

    return made


def supported(index: Any, device: str, gadget: Any) -> bool:
    """Memory of a GPU is indexed by torch, which has no slices that run backwards."""
    on_gpu = gadget._store().device.type == "cuda"
    return not (on_gpu and isinstance(index, slice) and index.step == -1) and bool(device)


@pytest.mark.parametrize("name", INDEXES)
def test_data_is_read_and_written_as_numpy_does(make: Any, name: str, device: str) -> None:
    index, plain = INDEXES[name], data()
    gadget = make(plain)
    if not supported(index, device, gadget):
        with pytest.raises(ValueError, match="step"):
            gadget.getData(index)
        return
    host = index.numpy() if isinstance(index, torch.Tensor) else index
    found = gadget.getData(index)
    assert found.is_cuda == torch.cuda.is_available()
    assert found.tolist() == plain[host].tolist()
    values = torch.full_like(found, 100.0, dtype=torch.float64)
    gadget.insertData(dataObject=values, indexes=index)
    plain[host] = 100
    assert gadget.getNumpyVersion().tolist() == plain.tolist()
    gadget.insertData(-1, index)
    plain[host] = -1
    assert gadget.getNumpyVersion().tolist() == plain.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float64", "complex64", "bool"])
@pytest.mark.parametrize("shape", [(6,), (6, 2, 3, 4)])
def test_data_may_have_any_rank_and_dtype(make: Any, dtype: str, shape: tuple[int, ...], device: str) -> None:
    plain = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    gadget = make(plain)
    assert gadget.getData(np.array([5, 1])).cpu().numpy().tolist() == plain[[5, 1]].tolist()
    gadget.insertData(gadget.getData(slice(0, 2)).clone(), slice(2, 4))
    plain[2:4] = plain[0:2]
    assert gadget.getNumpyVersion().dtype == plain.dtype
    assert gadget.getNumpyVersion().tolist() == plain.tolist()
    del device


def test_an_array_of_indexes_copies_and_a_slice_views(make: Any, device: str) -> None:
    gadget = make(data())
    copied, viewed = gadget.getData(np.array([0])), gadget.getData(slice(0, 1))
    gadget.insertData(torch.full((4,), 7.0), 0)
    assert copied.tolist() == [[0, 1, 2, 3]]
    is_a_view = gadget._store().pinned or gadget._store().device == viewed.device
    assert viewed.tolist() == ([[7] * 4] if is_a_view else [[0, 1, 2, 3]])
    del device


def test_init_is_called_by_the_first_use_or_by_the_script(make: Any, device: str) -> None:
    gadget = make(data())
    assert gadget._stores == {}
    gadget.gadgetInit()
    assert gadget.getData(1).tolist() == [4, 5, 6, 7]
    assert gadget.fileName == "data.npy"
    del device


@pytest.mark.parametrize("name", KINDS)
def test_an_array_or_tensor_is_taken_too(name: str, device: str) -> None:
    kind, pinned = KINDS[name]
    for array in (data(np.float64), torch.from_numpy(data(np.float64))):
        gadget = kind(array, CPUPinn=pinned)
        target = torch.zeros(5, 2)
        target[:] = gadget.getData(indexes=(slice(0, 5), slice(0, 2))).cpu()
        assert target.tolist() == data()[:, :2].tolist()
        gadget.insertData(dataObject=torch.nn.Parameter(torch.ones(2, 4)), indexes=np.array([0, 1]))
        changed = np.asarray(array)[0, 0] == 1
        assert changed == name.startswith("DataGadgetMM")  # it is used, not copied
    del device


@pytest.mark.parametrize("index", [5, [0, 5], slice(0, 9), (0, 4), (np.array([0, 7]), 1), (slice(None), np.array([4]))])
def test_what_is_out_of_range_is_refused_before_anything_is_written(make: Any, index: Any, device: str) -> None:
    gadget = make(data())
    if isinstance(index, slice):
        assert gadget.getData(index).shape == (5, 4)
        return
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        gadget.getData(index)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        gadget.insertData(1.0, index)
    assert gadget.getNumpyVersion().tolist() == data().tolist()
    del device


def test_a_memmap_gadget_changes_its_file_and_another_does_not(folder: Path, device: str) -> None:
    np.save("data.npy", data())
    SpeedTorch.DataGadget("data.npy").insertData(9.0, 0)
    assert np.load("data.npy").tolist() == data().tolist()
    gadget = SpeedTorch.DataGadgetMM("data.npy")
    gadget.insertData(9.0, 0)
    gadget.insertData(torch.zeros(2, 4), np.array([1, 2]))
    assert gadget.getCupyMM()[0].tolist() == [9] * 4
    del gadget
    assert np.load("data.npy")[:3].tolist() == [[9] * 4, [0] * 4, [0] * 4]
    del device


def test_files_in_other_orders_are_read_and_written_by_row(folder: Path, device: str) -> None:
    np.save("data.npy", np.asfortranarray(data(">f4")))
    gadget = SpeedTorch.DataGadgetMM("data.npy")
    assert gadget.getData((slice(None), 1)).tolist() == data()[:, 1].tolist()
    assert gadget.getData(slice(None, None, -1)).tolist() == data()[::-1].tolist()
    assert gadget.getData((2, 1)).item() == 9
    gadget.insertData(8.0, np.array([4]))
    assert gadget.getData([4]).tolist() == [[8] * 4]
    with pytest.raises(ValueError, match="whole rows"):
        gadget.insertData(1.0, (slice(None), 1))
    with pytest.raises(ValueError, match="no tensor has"):
        _ = gadget.CUPYmemmap
    assert SpeedTorch.DataGadget("data.npy").getData((slice(None), 1)).tolist() == [1, 5, 9, 13, 8]
    del device


def test_attributes_and_files(folder: Path, device: str) -> None:
    for pinned in (False, True):
        gadget = SpeedTorch.DataGadget(data(), CPUPinn=pinned)
        gadget.gadgetInit()
        assert gadget.CUPYcorpus.shape == (5, 4)
        assert str(gadget.CUPYcorpus.device)
        gadget.saveCupy("copy")
        gadget.insertData(0.0, slice(None))
        gadget.loadCupy("copy.npy")
        assert gadget.getNumpyVersion().tolist() == data().tolist()
    del device
