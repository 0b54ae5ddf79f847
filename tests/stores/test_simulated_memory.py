"""The simulated device's memory: poison, reuse in stream order, and what keep holds back."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch

from rowferry.stores.testing._simulated import SimulatedDevice
from rowferry.stores.testing._simulated_allocator import ContractError
from rowferry.stores.testing._simulated_clocks import RaceError

POISON = 0xA5


def fill(device: SimulatedDevice, tensor: torch.Tensor, value: int, name: str = "fill") -> None:
    device.launch(name, lambda: tensor.fill_(value), writes=[tensor])


def read(device: SimulatedDevice, tensor: torch.Tensor, into: list[list[int]], name: str = "read") -> None:
    device.launch(name, lambda: into.append(tensor.tolist()), reads=[tensor])


def bytes_of(device: SimulatedDevice, n: int = 4) -> torch.Tensor:
    return device.empty((n,), torch.uint8)


# ---- memory -------------------------------------------------------------------------------------------------


def test_fresh_memory_is_poison() -> None:
    device = SimulatedDevice()
    seen: list[list[int]] = []
    read(device, bytes_of(device), seen)
    device.drain()
    assert seen == [[POISON] * 4]
    assert device.pinned(3).tolist() == [POISON] * 3
    assert device.empty((2, 0), torch.float32).shape == (2, 0)


def test_fresh_memory_is_usable_on_another_stream_only_after_a_wait() -> None:
    device = SimulatedDevice()
    other = device.stream("other")
    x = bytes_of(device)
    with device.use(other), pytest.raises(RaceError, match="'allocation' on stream default"):
        fill(device, x, 1)


def test_a_freed_block_is_reused_on_its_stream_and_poisoned_in_stream_order() -> None:
    device = SimulatedDevice()
    seen: list[list[int]] = []
    x = bytes_of(device)
    address = x.data_ptr()
    fill(device, x, 1)
    read(device, x, seen)
    del x
    y = bytes_of(device)
    assert y.data_ptr() == address
    assert device.blocks == 1
    read(device, y, seen)
    device.drain()
    assert seen == [[1] * 4, [POISON] * 4]
    with device.use(device.stream("other")):
        assert bytes_of(device).data_ptr() != address  # another stream's pool


def test_a_view_keeps_its_block() -> None:
    device = SimulatedDevice()
    x = device.empty((4,), torch.float32)
    view = x[1:3].view(torch.int32).numpy()
    del x
    gc.collect()
    assert device.empty((4,), torch.float32).data_ptr() != view.ctypes.data - 4
    assert device.blocks == 2


def reader_on_another_stream(seed: int, *, keep: bool) -> tuple[SimulatedDevice, list[list[int]]]:
    device = SimulatedDevice(seed)
    home, reader = device.stream("home"), device.stream("reader")
    seen: list[list[int]] = []
    with device.use(home):
        x = bytes_of(device)
        fill(device, x, 1)
    device.wait(reader, device.record(home))
    with device.use(reader):
        read(device, x, seen)
    if keep:
        device.keep(x, reader)
    del x
    with device.use(home):
        fill(device, bytes_of(device), 2)
    return device, seen


def test_a_late_reader_without_keep_is_a_race_with_the_reuse() -> None:
    with pytest.raises(RaceError, match="'reuse, its last reference died' on stream home"):
        reader_on_another_stream(0, keep=False)


def test_keep_holds_a_block_back_until_the_other_stream_has_passed() -> None:
    for seed in range(10):
        device, seen = reader_on_another_stream(seed, keep=True)
        assert device.blocks == 2  # not reused yet
        device.drain()
        assert seen == [[1] * 4]
        with device.use(device.stream("home")):
            bytes_of(device)
    device, _ = reader_on_another_stream(0, keep=True)
    device.drain()
    home = next(stream for stream in device._streams if stream.name == "home")
    with device.use(home):
        held = [bytes_of(device), bytes_of(device)]
    assert device.blocks == len(held)  # both came back


def test_dropping_a_keep_is_found() -> None:
    device = SimulatedDevice()
    device.drop = lambda kind, stream, event, number: kind == "keep"
    other = device.stream("other")
    x = bytes_of(device)
    device.wait(other, device.record(device.current()))
    with device.use(other):
        read(device, x, [])
    device.keep(x, other)
    del x
    with pytest.raises(RaceError):
        device.drain()


@dataclasses.dataclass(frozen=True)
class Plan:
    rows: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


def holders(x: torch.Tensor) -> list[Callable[[], object]]:
    """Ways for launched work to hold a tensor that must not keep its block alive."""
    plan, by_name = Plan(x, (x[:2],)), {"x": [x]}

    def default(x: torch.Tensor = x) -> None:
        x.add_(1)

    return [lambda: x.add_(1), lambda: plan.rows.add_(1), lambda: by_name["x"][0].add_(1), default]


@pytest.mark.parametrize("way", range(4))
def test_queued_work_keeps_no_block_alive(way: int) -> None:
    device = SimulatedDevice()
    x = bytes_of(device)
    address = x.data_ptr()
    device.launch("work", holders(x)[way], writes=[x])
    del x
    y = bytes_of(device)
    assert y.data_ptr() == address
    device.drain()
    assert device.log == [("default", name) for name in ("poison", "work", "poison")]


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_work_that_alone_held_a_block_is_an_error() -> None:
    device = SimulatedDevice()

    def launch(box: Opaque) -> None:
        device.launch("hoarder", lambda: box.x.add_(1), writes=[box.x])

    launch(Opaque(bytes_of(device)))
    with pytest.raises(ContractError, match="'hoarder' held the last reference to block 0"):
        device.drain()


def test_the_lists_of_a_launch_are_all_that_it_may_touch() -> None:
    device = SimulatedDevice()
    x, y = bytes_of(device), bytes_of(device)
    fill(device, x, 1)
    device.launch("unlisted read", lambda: y.copy_(x), writes=[y])
    seen: list[list[int]] = []
    read(device, y, seen)
    device.launch("unlisted write", lambda: y.copy_(x), reads=[x, y])
    with pytest.raises(ContractError, match="'unlisted write' changed block 1, which its launch did not list"):
        device.drain()
    assert seen == [[POISON] * 4]


def test_launched_work_launches_nothing() -> None:
    device = SimulatedDevice()
    device.launch("outer", lambda: device.launch("inner", lambda: None))
    with pytest.raises(ContractError, match="'outer' launches 'inner'"):
        device.drain()


def test_copy_refuses_another_shape_or_dtype() -> None:
    device = SimulatedDevice()
    with pytest.raises(ValueError, match="shape and dtype must be the same"):
        device.copy(bytes_of(device, 3), bytes_of(device, 4))
    with pytest.raises(ValueError, match="label what empty"):
        device.label(torch.zeros(3), "mine")


def test_the_allocator_comes_to_rest_under_a_steady_loop() -> None:
    device = SimulatedDevice(free_bytes=123)
    side = device.stream("side")
    sizes = []
    for _ in range(50):
        x = bytes_of(device, 100)
        device.wait(side, device.record(device.current()))
        with device.use(side):
            read(device, x, [])
        device.keep(x, side)
        del x
        device.drain()
        sizes.append(device.blocks)
    assert sizes[-1] == sizes[5] <= 2
    assert device.free_bytes() == 123
    assert not device.capturing()
