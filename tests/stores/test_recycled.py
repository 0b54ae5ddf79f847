"""Large tensors of the CPU: their memory comes back when the last view of it has died, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rowferry.stores._devices import CpuDevice
from rowferry.stores._recycled import LARGE, Recycler


def test_memory_that_nobody_holds_is_lent_again() -> None:
    recycler = Recycler()
    first = recycler.empty(3 * LARGE)
    address = first.data_ptr()
    assert recycler.nbytes == 0
    del first
    assert recycler.nbytes >= 3 * LARGE
    assert recycler.empty(3 * LARGE).data_ptr() == address


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda tensor: tensor[5:9],
    "numpy": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "reshaped": lambda tensor: tensor.view(2, -1).t(),
    "autograd": lambda tensor: tensor.requires_grad_().mul(tensor).sum(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_under_any_view_is_not_lent_again(view: str) -> None:
    recycler = Recycler()
    tensor = recycler.empty(LARGE).view(torch.float32).fill_(1)
    address = tensor.data_ptr()
    kept = VIEWS[view](tensor)
    del tensor
    other = recycler.empty(LARGE).fill_(7)
    assert other.data_ptr() != address
    if view == "slice":
        assert kept.tolist() == [1.0] * 4
    if view == "autograd":
        kept.backward()
    del kept, other
    assert recycler.nbytes == 2 * LARGE


def test_sizes_that_are_nearly_equal_share_memory() -> None:
    recycler = Recycler()
    address = recycler.empty(8 * LARGE).data_ptr()
    assert recycler.empty(8 * LARGE - 1000).data_ptr() == address
    assert recycler.empty(8 * LARGE - 1000).numel() == 8 * LARGE - 1000


def test_no_more_than_the_limit_waits_to_be_lent() -> None:
    recycler = Recycler(most=4 * LARGE)
    tensors = [recycler.empty(LARGE) for _ in range(10)]
    tensors.clear()
    assert recycler.nbytes == 4 * LARGE


def test_threads_may_borrow_and_give_back_at_once() -> None:
    recycler = Recycler(most=16 * LARGE)
    wrong = []

    def work(value: int) -> None:
        for _ in range(50):
            tensor = recycler.empty(LARGE).fill_(value)
            if int(tensor.min()) != value or int(tensor.max()) != value:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recycler.nbytes <= 16 * LARGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_the_cpu_gives_large_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    shape = (3, LARGE // 2)
    tensor = CpuDevice().empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    with torch.inference_mode():
        assert not CpuDevice().empty(shape, dtype).is_inference()
