"""``DeviceStore``: rows where they lie, moved on the current stream. What every store promises is in ``test_contract.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rowferry.stores import DeviceStore
from rowferry.stores.testing import EVERY_DTYPE, bits, random_bits

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
def test_the_tensor_is_used_and_not_copied(device: str) -> None:
    tensor = torch.zeros(4, 3, device=device, requires_grad=True)
    store = DeviceStore(tensor)
    assert store.memory is not None
    assert store.memory.data_ptr() == tensor.data_ptr()
    assert not store.memory.requires_grad
    store.scatter([1], torch.ones(1, 3))
    assert tensor.detach().sum().item() == 3
    assert (store.device, store.name) == (tensor.device, f"memory of {tensor.device}")
    assert DeviceStore(tensor, name="scores").name == "scores"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_every_dtype_are_read_and_written_bit_for_bit(device: str) -> None:
    for dtype in EVERY_DTYPE:
        values = random_bits((20, 3), dtype)
        store = DeviceStore.from_array(values, device=device)
        assert (store.dtype, store.device.type) == (dtype, device)
        index = torch.tensor([[3, 19], [-20, 3]])
        assert bits(store.gather(index)) == bits(values[index])
        written = random_bits((2, 3), dtype, seed=1)
        store.scatter([7, 0], written)
        values[7], values[0] = written[0], written[1]
        assert bits(store.gather(slice(None))) == bits(values)
        out = torch.empty(1, 3, dtype=dtype, device=store.device)
        assert store.gather([7], out=out) is out
        assert bits(out) == bits(written[:1])


@pytest.mark.parametrize("device", DEVICES)
def test_of_a_row_that_occurs_twice_the_last_value_stays(device: str) -> None:
    store = DeviceStore.zeros((4, 2), torch.float32, device=device)
    for _ in range(20):
        store.scatter([0, 1, 0, 1, 0, 1], torch.arange(2.0, 8.0)[:, None].expand(6, 2))
        assert store.gather([0, 1]).tolist() == [[6, 6], [7, 7]]


@pytest.mark.parametrize("device", DEVICES)
def test_new_stores_have_their_shape_and_place(device: str) -> None:
    assert DeviceStore.empty((5, 2), torch.bfloat16, device=device).shape == (5, 2)
    store = DeviceStore.zeros((5, 2), torch.bfloat16, device=device, name="fresh")
    assert (store.device.type, store.name, store.nbytes) == (device, "fresh", 20)
    assert store.gather(slice(None)).equal(torch.zeros(5, 2, dtype=torch.bfloat16, device=store.device))
    with torch.inference_mode():
        made = DeviceStore.zeros((1, 2), torch.float32, device=device)
    made.scatter([0], torch.ones(1, 2))


def test_without_a_device_it_goes_where_the_default_is() -> None:
    assert DeviceStore.zeros((1,), torch.float32).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.broadcast_to(np.arange(3), (2, 3)),
        torch.arange(12).reshape(2, 6)[:, ::2],
        torch.ones(2, 3, requires_grad=True),
    ],
    ids=["big-endian", "read-only", "strided", "with gradient"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_an_array_of_any_layout_is_copied(array: Any, device: str) -> None:
    store = DeviceStore.from_array(array, device=device)
    assert store.gather(slice(None)).tolist() == array.tolist()
    first = array.tolist()
    store.scatter(slice(None), torch.zeros(2, 3, dtype=store.dtype))
    assert array.tolist() == first


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (np.zeros(3), TypeError, "not a ndarray; DeviceStore.from_array copies one"),
        (torch.zeros(3, 2).T, ValueError, r"pass tensor.contiguous\(\)"),
        (torch.zeros(()), ValueError, "at least one dimension"),
    ],
)
def test_what_has_no_rows_in_place_is_refused(tensor: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DeviceStore(tensor)


def test_what_is_no_device_of_this_machine_is_refused() -> None:
    for device in ("meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"{device}.*(not supported|no CUDA device|this machine has)"):
            DeviceStore.zeros((1,), torch.float32, device=device)


def test_an_index_that_may_not_be_written_is_read() -> None:
    index = np.array([2, 0])
    index.flags.writeable = False
    store = DeviceStore(torch.arange(3))
    assert store.gather(index).tolist() == [2, 0]
    store.scatter(index, torch.tensor([5, 6]))
    assert store.gather(slice(None)).tolist() == [6, 1, 5]


def test_a_tensor_outlives_its_store() -> None:
    tensor = torch.arange(3)
    DeviceStore(tensor).close()
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_work_runs_on_the_current_stream_and_the_index_may_be_changed_at_once() -> None:
    store = DeviceStore.zeros((1000, 64), torch.float32, device="cuda")
    side, index = torch.cuda.Stream(), np.arange(1000)  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        store.scatter(index, torch.arange(1000.0, device="cuda")[:, None].expand(1000, 64))
        index[:] = 0
        found = store.gather(range(1000))
    side.synchronize()
    assert found[:, 5].tolist() == list(range(1000))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_table_may_be_written_into_itself(device: str) -> None:
    table = torch.arange(200_000.0, device=device)[:, None].repeat(1, 8)
    expected = torch.cat([table[100_000:], table[100_000:]])
    DeviceStore(table).scatter(range(100_000), table[100_000:])
    assert table.equal(expected)
    DeviceStore(table).scatter(torch.randperm(200_000), table)
    assert table[:, 0].sort().values.equal(expected[:, 0].sort().values)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["claims", "sorted", "without kernels"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_last_of_repeated_rows_stays_in_a_gpus_memory(where: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "without kernels":
        monkeypatch.setattr("rowferry.stores._kernels.available", lambda _device: False)
    elif way == "sorted":
        monkeypatch.setattr("rowferry.stores._last_kernels.ROWS_A_CLAIM", 0)
    store, index, values = (
        DeviceStore(torch.zeros(5000, 6, device="cuda")),
        torch.randint(-5000, 5000, (20_000,)),
        torch.randn(20_000, 6),
    )
    expected = torch.zeros(5000, 6)
    for row, value in zip(index.tolist(), values, strict=True):
        expected[row] = value
    store.scatter(index.cuda() if where == "device" else index, values.cuda())
    assert store.gather(slice(None)).cpu().equal(expected)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_reached() -> None:
    n = 2**31 // 64 + 10
    store = DeviceStore.empty((n, 64), torch.int8, device="cuda")
    store.scatter([n - 1, -3, 0], torch.tensor([[1], [2], [3]]).expand(3, 64))
    assert store.gather([0, n - 3, n - 1])[:, 63].tolist() == [3, 2, 1]


@pytest.mark.gpu
def test_a_row_out_of_range_leaves_the_device_usable() -> None:
    store = DeviceStore.zeros((5, 2), torch.float32, device="cuda")
    for index in ([5], [-6], torch.tensor([0, 7], device="cuda")):
        with pytest.raises(IndexError):
            store.gather(index)
        with pytest.raises(IndexError):
            store.scatter(index, torch.zeros(len(index), 2))
    assert store.gather([4]).sum().item() == 0
