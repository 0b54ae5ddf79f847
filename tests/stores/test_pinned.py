"""``PinnedStore``: one memory seen three ways, given back with its last view, and alike without CUDA."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rowferry
from rowferry.stores import ArrayStore, PinnedStore
from rowferry.stores.testing import EVERY_DTYPE, bits, random_bits

SRC = Path(rowferry.__file__).parents[1]
NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture
def numbers() -> Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(4, 3)


@pytest.mark.parametrize("make", [PinnedStore, PinnedStore.empty, PinnedStore.zeros])
def test_a_new_store_has_its_shape_and_is_pinned_where_there_is_cuda(make: Callable[..., PinnedStore]) -> None:
    store = make((5, 2, 3), torch.float16)
    assert (store.shape, store.dtype, store.nbytes, store.device.type) == ((5, 2, 3), torch.float16, 60, "cpu")
    assert store.writable
    assert store.pinned == torch.cuda.is_available()
    assert store.gather(slice(None)).equal(torch.zeros(5, 2, 3, dtype=torch.float16))
    assert make((1,), torch.int8, name="scores").name == "scores"


def test_numpy_and_torch_see_one_memory(numbers: Tensor) -> None:
    store = PinnedStore.from_array(numbers)
    store.numpy()[1] = -1
    store.torch()[2] = -2
    store.scatter([3], torch.full((1, 3), -3.0))
    wanted = [[0, 1, 2], [-1] * 3, [-2] * 3, [-3] * 3]
    assert store.numpy().tolist() == store.torch().tolist() == store.gather(slice(None)).tolist() == wanted
    assert store.numpy().ctypes.data == store.torch().data_ptr()
    assert store.memory is store.torch()


def test_views_outlive_the_store(numbers: Tensor) -> None:
    store = PinnedStore.from_array(numbers)
    array, tensor = store.numpy(), store.torch()
    store.close()
    assert not store.pinned
    del store
    gc.collect()
    array[0, 0] = 5
    assert tensor[0, 0] == 5
    assert tensor[1:].equal(numbers[1:])


def test_a_closed_store_gives_no_view(numbers: Tensor) -> None:
    store = PinnedStore.from_array(numbers)
    store.close()
    for view in (store.numpy, store.torch, store.cupy):
        with pytest.raises(ValueError, match="closed"):
            view()


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_every_dtype_is_held_bit_for_bit(dtype: torch.dtype) -> None:
    values = random_bits((7, 3), dtype)
    store = PinnedStore.from_array(values)
    assert bits(store.torch()) == bits(values)
    if dtype in NOT_IN_NUMPY:
        with pytest.raises(TypeError, match=rf"NumPy has no {dtype}.*use torch\(\)"):
            store.numpy()
    else:
        assert store.numpy().tobytes() == bits(values)


@pytest.mark.parametrize("shape", [(0, 4), (0,), (4, 0), (3, 0, 2)])
def test_no_bytes_at_all_is_a_store_too(shape: tuple[int, ...]) -> None:
    store = PinnedStore.zeros(shape, torch.float32)
    assert (store.shape, store.nbytes, store.pinned) == (shape, 0, False)
    assert store.numpy().shape == tuple(store.torch().shape) == shape
    assert store.gather(slice(None)).shape == shape
    store.scatter(slice(None), torch.zeros(shape))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(4, 3),
        np.arange(12, dtype=">f4").reshape(4, 3),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.broadcast_to(np.arange(3, dtype=np.float32), (4, 3)),
        torch.arange(24, dtype=torch.float32).reshape(4, 6)[:, ::2],
        torch.zeros(4, 3, requires_grad=True),
    ],
    ids=["plain", "big-endian", "transposed", "read-only", "strided tensor", "with gradient"],
)
def test_an_array_is_copied_as_it_reads(array: np.ndarray | Tensor) -> None:
    store = PinnedStore.from_array(array)
    assert store.torch().tolist() == array.tolist()
    assert store.torch().is_contiguous()
    first = array.tolist()
    store.torch().fill_(-1)
    assert array.tolist() == first


@pytest.mark.parametrize(
    ("array", "text"),
    [([[1, 2]], "list is not an array"), (np.array(["x"]), "no dtype like"), (np.zeros(2, "f4,i4"), "no dtype")],
)
def test_what_torch_cannot_hold_is_refused(array: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        PinnedStore.from_array(array)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((), torch.float32, ValueError),
        ((-1, 2), torch.float32, ValueError),
        ((2.0, 2), torch.float32, TypeError),
        ((2, 2), np.float32, TypeError),
        ((2, 2), "float32", TypeError),
    ],
)
def test_what_is_no_shape_or_no_torch_dtype_is_refused(shape: Any, dtype: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        PinnedStore(shape, dtype)


def test_a_file_is_loaded_whole_and_left_alone(tmp_path: Path, numbers: Tensor) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, numbers.numpy())
    store = PinnedStore.load(path)
    assert store.name == f"pinned copy of {path}"
    assert store.torch().equal(numbers)
    store.torch().fill_(0)
    assert np.load(path).tolist() == numbers.tolist()
    assert PinnedStore.load(path, name="mine").name == "mine"


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_what_a_store_saved_is_loaded_again(tmp_path: Path, suffix: str) -> None:
    values = random_bits((50, 4), torch.bfloat16)
    PinnedStore.from_array(values).save(tmp_path / f"rows{suffix}")
    assert bits(PinnedStore.load(tmp_path / f"rows{suffix}", dtype=torch.bfloat16).torch()) == bits(values)


def test_two_stores_are_the_same_only_over_the_same_memory(numbers: Tensor) -> None:
    one, other = PinnedStore.from_array(numbers), PinnedStore.from_array(numbers)
    assert one.identity == one.identity != other.identity
    assert ArrayStore(one.torch()).identity == one.identity


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing where there is no GPU")
def test_without_cuda_memory_is_ordinary_and_cupy_says_what_is_missing(numbers: Tensor) -> None:
    store = PinnedStore.from_array(numbers)
    assert not store.pinned
    with pytest.raises(RuntimeError, match=r"needs a CUDA device.*numpy\(\) or torch\(\)"):
        store.cupy()
    with pytest.raises(TypeError, match="NumPy has no"):
        PinnedStore.zeros((1,), torch.bfloat16).cupy()


FORKED = """
import os, torch
from rowferry.stores import PinnedStore

store = PinnedStore.zeros((1000, 8), torch.float32)
assert store.pinned == (os.environ["CUDA_VISIBLE_DEVICES"] != "")
child = os.fork()
if not child:
    for use in (lambda: store.gather([0]), lambda: store.scatter([0], torch.zeros(1, 8)), lambda: store.identity):
        try:
            use()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            os._exit(1)
    del store
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
store.scatter([5], torch.ones(1, 8))
assert store.gather([5]).sum() == 8
print("both went on")
"""


@pytest.mark.parametrize("devices", ["", pytest.param("0", marks=pytest.mark.gpu)])
def test_a_forked_child_is_told_to_be_spawned(devices: str) -> None:
    path = os.pathsep.join([str(SRC), *filter(None, sys.path)])  # the child finds what this process found
    env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": devices}
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "both went on\n", done.stderr


# ---- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_lock_goes_with_the_last_view_and_the_address_may_be_locked_again() -> None:
    kept = []
    for _ in range(20):  # the system hands out the same addresses again: a lock left behind would be refused
        store = PinnedStore.zeros((1 << 20, 64), torch.uint8)
        array = store.numpy()
        store.close()
        del store
        gc.collect()
        assert torch.from_numpy(array).is_pinned()
        kept.append(array.ctypes.data)
        del array
    assert len(set(kept)) < 20


@pytest.mark.gpu
def test_cupy_sees_the_same_memory_and_its_kernels_write_it() -> None:
    import cupy

    store = PinnedStore.from_array(torch.arange(12, dtype=torch.float32).reshape(4, 3))
    view = store.cupy()
    assert isinstance(view, cupy.ndarray)
    assert (view.shape, view.data.ptr) == ((4, 3), store.torch().data_ptr())
    view *= 2
    cupy.cuda.Device().synchronize()
    assert store.numpy().tolist() == store.torch().tolist() == (torch.arange(12).reshape(4, 3) * 2).tolist()
    store.close()
    del store
    gc.collect()
    assert cupy.asnumpy(view).tolist() == (torch.arange(12).reshape(4, 3) * 2).tolist()
    assert PinnedStore.zeros((0, 3), torch.float32).cupy().shape == (0, 3)


@pytest.mark.gpu
def test_rows_come_from_arrays_on_the_gpu() -> None:
    import cupy

    values = torch.arange(24, dtype=torch.float32, device="cuda").reshape(4, 6)
    assert PinnedStore.from_array(values[:, ::2]).torch().equal(values[:, ::2].cpu())
    assert PinnedStore.from_array(cupy.arange(6).reshape(2, 3)).torch().tolist() == [[0, 1, 2], [3, 4, 5]]
