"""How fast the link to a device is: what its copy engine reaches, measured once a process."""

from __future__ import annotations

import threading

import torch

from ._device_contract import Device

PROBE_BYTES = 32 << 20  # pinned and on the device, for the length of the probe
COPIES, ROUNDS = 4, 4  # copies in a row come within 2 % of one long copy; 2.5 ms a round at 55 GB/s

_rates: dict[torch.device, float] = {}  # what is measured is the machine's, not a pipeline's
_lock = threading.Lock()


def link_rate(device: Device) -> float:
    """Bytes a second from pinned host memory to ``device``, measured by the first who asks: some 10 ms of copies and a wait.

    Any thread. What else uses the link meanwhile makes it look slower, so the best of a few rounds counts.
    """
    with _lock:
        if device.torch not in _rates:
            _rates[device.torch] = _measure(device)
        return _rates[device.torch]


def _measure(device: Device) -> float:
    stream = device.stream("link")
    host = device.pinned(PROBE_BYTES)
    times = []
    with device.use(stream):
        there = device.empty((PROBE_BYTES,), torch.uint8)
        for _ in range(ROUNDS):
            start = device.record(stream, timing=True)
            for _ in range(COPIES):
                device.copy(there, host)
            end = device.record(stream, timing=True)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return COPIES * PROBE_BYTES / (min(times) * 1e-3)
