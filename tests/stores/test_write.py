"""``Store.scatter`` without the host, and what orders it before and after other uses of the same memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rowferry as rf
from rowferry.stores import ArrayStore, DeviceStore, PinnedStore, Store
from rowferry.stores import _read as reading
from rowferry.stores._device_contract import Device
from rowferry.stores._devices import CpuDevice
from rowferry.stores._in_flight import InFlight
from rowferry.stores._row_numbers import on_device
from rowferry.stores._write import places_of_last, sorted_rows
from rowferry.stores.testing import EVERY_DTYPE, bits, random_bits

Make = Callable[[Tensor], Store]
KINDS: dict[str, Make] = {
    "pinned": PinnedStore.from_array,
    "device": lambda values: DeviceStore.from_array(values, device="cuda"),
    "array": ArrayStore,
    "array, pinned": lambda values: ArrayStore(values.pin_memory()),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class Events:
    """A device that notes what is ordered after what; its events count how often the host waited for them."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []
        self.recorded = 0

    def record(self, stream: str) -> Event:
        self.recorded += 1
        return Event(f"{stream} {self.recorded}", self)

    def wait(self, stream: str, event: Event) -> None:
        self.waits.append((stream, event.name))

    def asked(self) -> list[tuple[str, str]]:
        """Waits since the last call."""
        found, self.waits = self.waits, []
        return found


class Event:
    def __init__(self, name: str, events: Events) -> None:
        self.name, self.events = name, events

    def synchronize(self) -> None:
        self.events.waits.append(("host", self.name))


# ---- pure: what is sorted, and what is ordered ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorted_rows_mark_the_last_of_each(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 500):
        rows = torch.from_numpy(rng.integers(0, max(size // 2, 1), size)).to(dtype)
        ascending, places, last = sorted_rows(rows)
        assert torch.equal(rows[places], ascending)
        assert ascending.tolist() == sorted(rows.tolist())
        wanted = {row: place for place, row in enumerate(rows.tolist())}
        assert dict(zip(ascending[last].tolist(), places[last].tolist(), strict=True)) == wanted
        assert [wanted[row] for row in ascending.tolist()] == places_of_last(places, last).tolist()


@pytest.mark.parametrize("rows", [9, 2**31])
def test_row_numbers_lie_one_after_the_other_for_kernels(rows: int) -> None:
    store: Any = range(rows)  # what has a length
    found = on_device(torch.arange(8)[::2], store, CpuDevice())
    assert found.dtype == (torch.int32 if rows < 2**31 else torch.int64)
    assert found.is_contiguous()
    assert found.tolist() == [0, 2, 4, 6]


def test_reads_wait_for_writes_and_writes_for_reads_on_every_stream() -> None:
    events = Events()
    device: Any = events
    uses = InFlight()
    uses.before_read(device, "a")
    uses.after_read(device, "a")
    uses.before_read(device, "b")
    uses.after_read(device, "b")
    assert events.asked() == []
    uses.before_write(device, "c")
    assert events.asked() == [("c", "a 1"), ("c", "b 2")]
    uses.after_write(device, "c")
    uses.before_read(device, "a")
    uses.after_read(device, "a")
    assert events.asked() == [("a", "c 3")]
    uses.before_write(device, "a")
    assert ("a", "c 3") in events.asked()
    uses.wait_for_writes()
    assert events.asked() == [("host", "c 3")]
    uses.wait_for_writes()
    assert events.asked() == []
    uses.wait_for_all()
    assert sorted(events.asked()) == [("host", "a 4"), ("host", "b 2")]
    uses.wait_for_all()
    assert events.asked() == []


def test_a_store_waits_for_its_kernels_where_the_host_touches_its_memory() -> None:
    store, events = PinnedStore.zeros((4, 2), torch.float32), Events()
    device: Any = events

    def used(call: Callable[[], Any]) -> set[str]:
        store.in_flight.after_write(device, "s")
        store.in_flight.after_read(device, "t")
        call()
        waited = {name.split()[0] for stream, name in events.asked() if stream == "host"}
        store._settle()
        events.asked()
        return waited

    assert used(lambda: store.gather([0])) == {"s"}
    assert used(lambda: store.read([0], "cpu")) >= {"s"}
    assert used(store.flush) == {"s"}
    assert used(store.torch) == used(store.numpy) == {"s", "t"}
    assert used(lambda: store.scatter([0], torch.ones(1, 2))) == {"s", "t"}
    assert used(lambda: store.init_(torch.nn.init.zeros_)) == {"s", "t"}
    assert used(lambda: store.copy_from(PinnedStore.zeros((4, 2), torch.float32))) == {"s", "t"}
    assert used(lambda: list(rf.Pipeline(store, batch_size=2, device="cpu"))) == {"s", "t"}
    assert used(store.close) == {"s", "t"}


def test_rows_of_a_store_are_written_into_it_as_its_kernels_leave_them() -> None:
    store = PinnedStore.zeros((4, 2), torch.float32)
    rows = store.torch()

    class Late:
        def synchronize(self) -> None:
            rows[0] = 7.0  # what a kernel writes, as late as it may

    class Device:
        def record(self, stream: Any) -> Late:
            del stream
            return Late()

    device: Any = Device()
    store.in_flight.after_write(device, "s")
    store.scatter([3], rows[:1])
    assert rows[3].tolist() == [7.0, 7.0]


def test_a_store_that_is_dropped_waits_for_its_kernels_first() -> None:
    store, events = PinnedStore.zeros((4, 2), torch.float32), Events()
    device: Any = events
    store.in_flight.after_read(device, "t")
    del store
    gc.collect()
    assert events.asked() == [("host", "t 1")]


def test_the_cpu_device_orders_nothing() -> None:
    device: Device = CpuDevice()
    uses = InFlight()
    uses.after_write(device, device.current())
    uses.before_read(device, device.current())
    uses.wait_for_all()


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("where", ["host", "device"])
def test_values_of_a_gpu_are_written_bit_for_bit_and_the_last_one_stays(make: Make, where: str) -> None:
    rng = np.random.default_rng(0)
    for dtype in EVERY_DTYPE:
        plain = random_bits((60, 3), dtype)
        store = make(plain.clone())
        for count in (0, 1, 5, 200):
            index = torch.from_numpy(rng.integers(-60, 60, count))
            values = random_bits((count, 3), dtype, seed=count)
            store.scatter(index.cuda() if where == "device" else index.numpy(), values.cuda())
            for row, value in zip(index.tolist(), values, strict=True):
                plain[row] = value
            assert bits(store.gather(slice(None)).cpu()) == bits(plain)
            assert bits(store.read(index, "cuda").cpu()) == bits(plain[index])


@pytest.mark.gpu
@every_kind
def test_what_does_not_fit_is_refused_and_nothing_is_written(make: Make) -> None:
    store = make(torch.zeros(4, 2))
    for index in ([0, 4], torch.tensor([0, 4], device="cuda")):
        with pytest.raises(IndexError, match="row 4 is out of range"):
            store.scatter(index, torch.ones(2, 2, device="cuda"))
    with pytest.raises(ValueError, match="have shape"):
        store.scatter([0], torch.ones(2, 2, device="cuda"))
    with pytest.raises(TypeError, match="imaginary"):
        store.scatter([0], torch.ones(1, 2, device="cuda", dtype=torch.complex64))
    store.scatter([[0], [1]], torch.full((2, 1, 2), 3, device="cuda", dtype=torch.int32))
    assert store.gather(slice(None)).tolist() == [[3, 3], [3, 3], [0, 0], [0, 0]]


@pytest.mark.gpu
def test_the_host_does_not_wait_and_later_calls_see_the_rows() -> None:
    store = PinnedStore.zeros((1000, 64), torch.float32)
    values = torch.ones(500, 64, device="cuda")
    store.scatter(np.arange(500), values)  # loads kernels
    store.flush()
    store.read(np.arange(5), "cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for number in range(2, 8):
        torch.cuda._sleep(400_000_000)
        start = time.perf_counter()
        values.fill_(number)
        store.scatter(np.arange(500), values)
        values.fill_(-1)
        assert time.perf_counter() - start < 0.05
        if number % 2:
            with torch.cuda.stream(side):  # also to look at them: rows are ready on the stream that was current
                found = store.read(np.arange(0, 1000, 100), "cuda")[:, 0].tolist()
            assert found == [number] * 5 + [0] * 5
        else:
            assert store.numpy()[::100, 0].tolist() == [number] * 5 + [0] * 5


@pytest.mark.gpu
def test_the_host_writes_behind_a_read_that_has_not_run_yet() -> None:
    store = PinnedStore.from_array(torch.ones(1000, 64))
    store.read([0], "cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    found = store.read(np.arange(1000), "cuda")
    store.scatter(np.arange(1000), torch.zeros(1000, 64))
    assert bool((found == 1).all())


@pytest.mark.gpu
def test_a_store_may_be_dropped_while_a_kernel_uses_it() -> None:
    for _ in range(20):
        store = PinnedStore.from_array(torch.ones(20_000, 64))
        torch.cuda._sleep(20_000_000)
        found = store.read(np.arange(20_000), "cuda")
        store.scatter(np.arange(20_000), found)
        del store
        assert bool((found == 1).all())
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_views_may_be_dropped_while_a_kernel_of_the_user_uses_them() -> None:
    pytest.importorskip("cupy")
    for _ in range(20):
        array = PinnedStore.from_array(torch.ones(20_000, 64)).cupy()
        torch.cuda._sleep(20_000_000)
        found = array * 2
        del array
        assert float(found.sum()) == 2 * 20_000 * 64


@pytest.mark.gpu
def test_rows_of_a_large_table_are_read_in_sorted_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SORT_FROM", 8)
    monkeypatch.setattr(reading, "SMALL_TABLE", 0)
    table = torch.randn(5000, 6)
    store = PinnedStore.from_array(table)
    for count in (7, 8, 3000):
        index = torch.randint(-5000, 5000, (count,))
        assert store.read(index, "cuda").cpu().equal(table[index])
        assert store.read(index.cuda()).cpu().equal(table[index])


@pytest.mark.gpu
def test_reads_and_writes_leave_the_allocator_at_rest() -> None:
    store = PinnedStore.zeros((100_000, 32), torch.float32)
    index = np.random.default_rng(0).integers(0, 100_000, 20_000)
    for turn in range(200):
        store.scatter(index, store.read(index, "cuda"))
        torch.cuda.synchronize()  # how far the host is ahead decides how much is in use at once
        if turn == 20:
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved
