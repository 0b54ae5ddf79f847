"""``rf.prefetch``: the items of any iterable, on the device, ahead of use."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import rowferry as rf
from rowferry.pipeline.testing._host import SimulatedHost
from rowferry.stores.testing import SimulatedDevice
from rowferry.stores.testing._simulated_clocks import RaceError

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Sample:
    rows: Tensor
    name: str


class Movable:
    """An object that knows how to move itself."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def to(self, device: Any) -> Movable:
        return Movable(device)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(100.0), torch.arange(100)), batch_size=7)


def test_a_loader_gives_the_same_items_every_epoch_and_keeps_its_length() -> None:
    ferried = rf.prefetch(loader(), device="cpu")
    assert len(ferried) == len(loader()) == 15
    for _ in range(2):
        for (x, y), (wanted_x, wanted_y) in zip(ferried, loader(), strict=True):
            assert torch.equal(x, wanted_x)
            assert torch.equal(y, wanted_y)


def test_an_iterable_without_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(rf.prefetch((item for item in [torch.ones(1)]), device="cpu"))


@pytest.mark.parametrize(
    "item",
    [
        {"a": torch.ones(2), "b": [torch.zeros(1), "text"]},
        OrderedDict(a=torch.ones(2)),
        UserDict(a=torch.ones(2)),
        (torch.ones(1), 3, None),
        Point(torch.ones(1), torch.zeros(1)),
        Sample(torch.ones(3), "n"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_containers_keep_their_kind(item: Any) -> None:
    (found,) = list(rf.prefetch([item], device="cpu"))
    assert type(found) is type(item)
    assert str(found) == str(item)


def test_objects_move_themselves_and_others_pass_through() -> None:
    array, thing = np.arange(3), object()
    (found,) = list(rf.prefetch([(Movable(), array, thing, "s")], device="cpu"))
    assert found[0].device == torch.device("cpu")
    assert found[1] is array
    assert found[2] is thing


def test_floating_tensors_are_cast_once_and_integers_are_not() -> None:
    item = (torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64), torch.tensor([3]))
    ((x, y),) = list(rf.prefetch([item], device="cpu", dtype=torch.float16))
    assert x.dtype == torch.float16
    assert float(x) == 1 + 2**-10
    assert y.dtype == torch.int64


def test_an_error_comes_after_the_items_before_it_and_a_new_iter_works() -> None:
    class Failing:
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(1)
            raise OSError("the disk is on fire")

    ferried = rf.prefetch(Failing(), device="cpu")
    for _ in range(2):
        items = iter(ferried)
        assert float(next(items)) == 0
        with pytest.raises(OSError, match="on fire"):
            next(items)
        assert list(items) == []


def test_it_is_ahead_by_depth_and_no_further() -> None:
    drawn: list[int] = []
    asked = threading.Event()  # set at each draw

    def source() -> Iterator[Tensor]:
        for number in range(10):
            drawn.append(number)
            asked.set()
            yield torch.tensor(number)

    items = iter(rf.prefetch(source(), device="cpu", depth=3))
    assert int(next(items)) == 0
    while len(drawn) < 4:
        asked.clear()
        assert asked.wait(5) or len(drawn) >= 4
    assert len(drawn) <= 5
    assert [int(item) for item in items] == list(range(1, 10))


def test_a_broken_loop_and_a_second_iter_stop_the_first_thread() -> None:
    ferried = rf.prefetch([torch.tensor(number) for number in range(50)], device="cpu")
    first = iter(ferried)
    next(first)
    second = iter(ferried)
    assert list(first) == []
    assert int(next(second)) == 0
    ferried.close()
    assert list(second) == []


def test_an_iterable_that_never_returns_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    asked, release = threading.Event(), threading.Event()

    def source() -> Iterator[Tensor]:
        yield torch.zeros(1)
        asked.set()
        release.wait(30)

    ferried = rf.prefetch(source(), device="cpu")
    items = iter(ferried)
    next(items)
    assert asked.wait(5)
    with caplog.at_level(logging.WARNING, "rowferry"):
        ferried.close()
    release.set()
    assert "rowferry-prefetch" in caplog.text
    assert list(items) == []


def test_set_epoch_reaches_the_sampler() -> None:
    class Sampled:
        epoch = -1

        def __iter__(self) -> Iterator[Tensor]:
            yield torch.tensor(self.epoch)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    ferried = rf.prefetch(Sampled(), device="cpu")
    ferried.set_epoch(4)
    assert [int(item) for item in ferried] == [4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rf.prefetch([], device="cpu", depth=0), "depth is 0"),
        (lambda: rf.prefetch(3, device="cpu"), "iterable"),  # type: ignore[arg-type]
        (lambda: rf.prefetch([], device="cpu", dtype=torch.int64), "fractions"),
    ],
)
def test_bad_arguments_are_refused_at_once(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def simulated(seed: int, drop: Any = None) -> list[list[float]]:
    """Ten items through a simulated device whose work runs late, read by the consumer's stream."""
    device = SimulatedDevice(seed)
    if drop is not None:
        device.drop = drop
    ferried = rf.prefetch(
        [(torch.full((4,), float(number), dtype=torch.float64),) for number in range(10)],
        device=device,  # type: ignore[arg-type]  # a simulated device is taken as it is
        dtype=torch.float16 if seed % 2 else None,
        depth=1 + seed % 3,
    )
    host = SimulatedHost(device, seed)
    ferried._new_host = lambda: host
    seen: list[list[float]] = []

    def note(rows: Tensor) -> None:
        device.launch("note", lambda: seen.append(rows.tolist()), reads=[rows])

    for (rows,) in ferried:
        host.pause()
        note(rows)
        del rows
    device.drain()
    if device.races:
        raise device.races[0]
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_every_item_is_whole_however_late_the_device_runs(seed: int) -> None:
    assert simulated(seed) == [[float(number)] * 4 for number in range(10)]


@pytest.mark.parametrize("kind", ["wait", "record", "keep"])
def test_leaving_out_any_kind_of_edge_is_detected(kind: str) -> None:
    def wrong(seed: int) -> bool:
        try:
            found = simulated(seed, lambda dropped, stream, event, number: dropped == kind)
        except RaceError:
            return True
        return found != [[float(number)] * 4 for number in range(10)]

    assert any(wrong(seed) for seed in range(60))
