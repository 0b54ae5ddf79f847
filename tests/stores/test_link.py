"""The link's rate is what copies from pinned memory reach."""

from __future__ import annotations

import pytest

from rowferry.stores._device_contract import Device
from rowferry.stores._devices import CpuDevice
from rowferry.stores._link import PROBE_BYTES, _measure
from rowferry.stores.testing import SimulatedDevice


def test_it_is_what_the_copy_engine_reaches() -> None:
    device = SimulatedDevice()
    device.cost = lambda stream, name, nbytes: nbytes / 50e9 if name == "copy" else 0.0
    assert _measure(device) == pytest.approx(50e9)
    assert device.ran["copy"] == 16
    assert device.races == []


def test_the_probe_is_small() -> None:
    assert PROBE_BYTES <= 32 << 20


def test_a_cpu_has_no_link() -> None:
    device: Device = CpuDevice()
    assert device.link_rate() is None


def test_a_cpu_tells_time_by_its_own_clock() -> None:
    device: Device = CpuDevice()
    start = device.now()
    first, last = device.record("any", timing=True), device.record("any", timing=True)
    assert first.query()
    first.synchronize()
    assert 0 <= first.elapsed_time(last) <= (device.now() - start) * 1e3


def test_a_simulated_event_that_was_recycled_is_not_asked_again() -> None:
    device = SimulatedDevice()
    first, last = (device.record(device.current(), timing=True) for _ in range(2))
    device.drain()
    device.recycle(first)
    with pytest.raises(ValueError, match="recycled"):
        first.elapsed_time(last)
