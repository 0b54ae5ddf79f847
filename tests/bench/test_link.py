"""The limit: what large copies reach."""

from __future__ import annotations

import pytest

from rowferry._bench.link import copy_speed, memory_speed
from rowferry.stores._devices import CpuDevice, default_device, device_for


def test_copies_are_measured_each_way_and_both_at_once_and_no_more_is_copied_than_was_said() -> None:
    speed = copy_speed(CpuDevice(), 1 << 20)
    assert speed.copied_bytes == 1 << 20
    assert min(speed.to_device, speed.to_host, speed.both) > 0
    assert memory_speed(CpuDevice(), 1 << 20) > 0


@pytest.mark.gpu
def test_both_directions_at_once_carry_more_than_one_and_less_than_their_sum() -> None:
    device = device_for(default_device())
    speed = copy_speed(device)
    assert max(speed.to_device, speed.to_host) < speed.both < 1.1 * (speed.to_device + speed.to_host)
    assert memory_speed(device) > speed.both
