"""``Store.read``: rows on demand, from every store to every device, ready on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.stores import ArrayStore, DeviceStore, MemmapStore, PinnedStore, Store, create_store
from rowferry.stores import _kernels as kernels_of
from rowferry.stores import _read as reading
from rowferry.stores.testing import EVERY_DTYPE, FailingStore, OracleStore, bits, random_bits, write_npy_file

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
STORES = ("array", "memmap", "pinned", "device", "zarr", "oracle")
Make = Callable[[Tensor], Store]


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """``make(values)``: a store of them, once for each kind."""

    def zarr(values: Tensor) -> Store:
        return create_store(tmp_path / "rows.zarr", tuple(values.shape), values.dtype, chunks=3).copy_from(OracleStore(values))

    kinds: dict[str, Make] = {
        "array": ArrayStore,
        "memmap": lambda values: MemmapStore(write_npy_file(tmp_path / "rows.npy", values), dtype=values.dtype),
        "pinned": PinnedStore.from_array,
        "device": DeviceStore.from_array,
        "zarr": zarr,
        "oracle": OracleStore,
    }
    return kinds[request.param]


def table() -> Tensor:
    return torch.arange(40, dtype=torch.float32).reshape(10, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "index",
    [[3, 0, 9, 3], [], [[1, -1], [-10, 4]], range(8, 0, -3), slice(2, 5), 7, np.array([2, 2], np.uint8), torch.tensor([[[5]]])],
    ids=["repeats", "none", "negative, two dimensions", "range", "slice", "one row", "uint8", "three dimensions"],
)
def test_rows_come_in_the_order_and_shape_asked_for(make: Make, index: Any, device: str) -> None:
    store = make(table())
    found = store.read(index, device)
    assert found.device.type == device
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert found.cpu().equal(store.gather(index).cpu())
    assert store.read(torch.arange(10) % 2 == 1, device)[:, 0].tolist() == [4, 12, 20, 28, 36]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_the_callers_own(make: Make, device: str) -> None:
    store = make(table())
    for index in ([0, 1, 2], slice(None)):
        found = store.read(index, device)
        found.fill_(-1)
        assert store.gather(slice(None)).cpu().equal(table())
    found = store.read([2], device)
    store.close()
    assert found.tolist() == [[8, 9, 10, 11]]
    with pytest.raises(ValueError, match="closed"):
        store.read([2], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [PinnedStore.from_array, ArrayStore, DeviceStore.from_array])
def test_rows_of_every_dtype_come_bit_for_bit(kind: Make, device: str) -> None:
    for dtype in EVERY_DTYPE:
        values = random_bits((9, 5), dtype)
        assert bits(kind(values).read([8, 0, 0, 3], device)) == bits(values[[8, 0, 0, 3]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0,)])
def test_a_store_without_bytes_is_read(shape: tuple[int, ...], device: str) -> None:
    for store in (PinnedStore.zeros(shape, torch.float32), ArrayStore(torch.zeros(shape))):
        assert store.read(slice(None), device).shape == shape
        assert store.read([], device, torch.float16).shape == (0, *shape[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_casts_round_once_and_take_integers_too(make: Make, device: str) -> None:
    values = torch.tensor([[1 + 2**-11 + 2**-40], [65519.996], [65520]], dtype=torch.float64)
    found = make(values).read([0, 1, 2], device, torch.float16)
    assert found.dtype == torch.float16
    assert found.flatten().tolist() == [1 + 2**-10, 65504, float("inf")]


@pytest.mark.parametrize("device", DEVICES)
def test_integers_are_cast_to_floats(device: str) -> None:
    found = PinnedStore.from_array(torch.tensor([2**62 + 2**54 + 1])).read([0], device, torch.bfloat16)
    assert found.tolist() == [2**62 + 2**55]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("index", "dtype", "error", "text"),
    [
        ([0, 10], None, IndexError, r"row 10 is out of range .* 10 rows"),
        ([-11], None, IndexError, "row -11 is out of range"),
        ([True, False], None, IndexError, "mask must have shape"),
        ([0.5], None, TypeError, "must be integers"),
        ([0], torch.int32, TypeError, "fractions"),
        ([0], np.float16, TypeError, "not a torch dtype"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(
    index: Any, dtype: Any, error: type[Exception], text: str, device: str
) -> None:
    store = FailingStore(OracleStore(table()), OSError("was read"), broken=True)
    with pytest.raises(error, match=text):
        store.read(index, device, dtype)


def test_what_is_no_device_here_is_refused() -> None:
    for device in ("meta", "cuda:99"):
        with pytest.raises(ValueError, match=device):
            ArrayStore(table()).read([0], device)


def test_the_errors_of_a_store_come_as_they_are() -> None:
    with pytest.raises(OSError, match="bad sector"):
        FailingStore(OracleStore(table()), OSError("bad sector"), broken=True).read([0], "cpu")


def test_without_a_device_rows_go_where_the_default_is() -> None:
    assert PinnedStore.from_array(table()).read([0]).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


# ---- on a GPU -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["kernels", "sorted kernels", "staging"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way that pinned rows cross: by a kernel, by one that meets them in sorted order, by the host."""
    if request.param == "sorted kernels":
        monkeypatch.setattr(reading, "SORT_FROM", 1)
    if request.param == "staging":
        monkeypatch.setattr(kernels_of, "available", lambda device: False)


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16, torch.uint64])
def test_a_cuda_index_gives_the_rows_of_a_host_index(make: Make, dtype: torch.dtype) -> None:
    store = make(table())
    numbers = torch.tensor([[9, 0, 3], [3, 9, 1]])
    index = numbers.to(dtype).cuda()
    assert store.read(index).cpu().equal(table()[numbers])
    assert index.cpu().long().equal(numbers)
    assert store.read(torch.tensor([-1, -10], device="cuda"))[:, 0].tolist() == [36, 0]
    assert store.read((torch.arange(10) == 4).cuda())[:, 0].tolist() == [16]


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
def test_a_cuda_index_out_of_range_is_refused_and_the_device_stays_usable(make: Make) -> None:
    store = make(table())
    for wrong in (10, -11, 2**40):
        with pytest.raises(IndexError, match=f"row {wrong} is out of range"):
            store.read(torch.tensor([0, wrong, 3], device="cuda"))
    with pytest.raises(IndexError, match="out of range"):
        store.read(torch.tensor([2**64 - 1], dtype=torch.uint64).cuda())  # not row -1
    with pytest.raises(TypeError, match="must be integers"):
        store.read(torch.tensor([0.0], device="cuda"))
    assert store.read([9])[0, 0].item() == 36


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
def test_many_rows_of_pinned_memory_are_read_right() -> None:
    values = torch.randint(0, 256, (100_000, 129), dtype=torch.uint8)
    store = PinnedStore.from_array(values)
    index = torch.randint(0, 100_000, (300_000,))
    assert store.read(index).cpu().equal(values[index])
    assert store.read(index.cuda().int()).cpu().equal(values[index])


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
def test_rows_are_ready_on_the_stream_that_is_current(make: Make) -> None:
    store = make(table())
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    index = np.arange(10)
    late = torch.zeros(10, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        first = store.read(index).clone()
        index[:] = 0
        others = [store.read([number]) for number in range(10)]  # would take a staging block that was freed too early
        late.copy_(torch.arange(9, -1, -1, device="cuda"))
        turned = store.read(late).clone()
    side.synchronize()
    assert first.cpu().equal(table())
    assert torch.cat(others).cpu().equal(table())
    assert turned.cpu().equal(table().flip(0))


@pytest.mark.gpu
def test_rows_of_a_table_on_the_gpu_come_to_the_host_when_asked() -> None:
    store = DeviceStore.from_array(table(), device="cuda")
    assert store.read([1, 1]).device.type == "cuda"
    assert store.read(torch.tensor([9, 0], device="cuda"), "cpu").equal(table()[[9, 0]])
