"""The limit that all else is a share of: what large copies reach, over the link or, without a GPU, in host memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from rowferry.stores._device_contract import Device
from rowferry.stores._devices import CpuDevice

from .clock import timed

COPY_BYTES = 1 << 30
HOST_COPY_BYTES = 128 << 20  # more than caches hold
_REPEATS = 5
_BOTH_COPIES = 4  # a direction that ends first would leave the other the link for itself: a few copies hide that


class CopySpeed(NamedTuple):
    """GB/s (1e9 bytes) of the copy engines between pinned host memory and a device; medians of a few copies.

    ``both``: the sum of the two directions at once.
    """

    to_device: float
    to_host: float
    both: float
    copied_bytes: int


def copy_speed(device: Device, most: int = COPY_BYTES) -> CopySpeed:
    """Measure copies of up to ``most`` bytes between pinned memory and a CUDA ``device``; takes about a second."""
    nbytes = min(most, device.free_bytes() // 8, CpuDevice().free_bytes() // 8)
    sent, received = device.pinned(nbytes), device.pinned(nbytes)
    source, sink = device.empty((nbytes,), torch.uint8), device.empty((nbytes,), torch.uint8)
    device.copy(source, sent)
    device.copy(received, source)
    up, down = device.stream("up"), device.stream("down")

    def both() -> None:
        here = device.current()
        begun = device.record(here)
        for stream, out, rows in ((up, sink, sent), (down, received, source)):
            device.wait(stream, begun)
            with device.use(stream):
                for _ in range(_BOTH_COPIES):
                    device.copy(out, rows)
        for stream in (up, down):
            device.wait(here, device.record(stream))

    return CopySpeed(
        _rate(device, lambda: device.copy(sink, sent), nbytes),
        _rate(device, lambda: device.copy(received, source), nbytes),
        _rate(device, both, 2 * _BOTH_COPIES * nbytes),
        nbytes,
    )


def memory_speed(device: Device, most: int | None = None) -> float:
    """GB/s that a large copy inside the device's own memory moves: bytes read and bytes written, both counted."""
    most = most or (COPY_BYTES // 2 if device.is_cuda else HOST_COPY_BYTES)
    nbytes = min(most, device.free_bytes() // 8)
    source, sink = (device.empty((nbytes,), torch.uint8) for _ in range(2))
    source.fill_(1)  # pages that were never written are all one page
    sink.copy_(source)
    times = 10 if device.is_cuda else 1

    def copies() -> None:
        for _ in range(times):
            sink.copy_(source)

    return _rate(device, copies, 2 * times * nbytes)


def _rate(device: Device, fn: Callable[[], None], nbytes: int) -> float:
    return nbytes / statistics.median(timed(fn, device, _REPEATS)) / 1e9
