"""The GPU in use: what it is, its link, and what a copy over that link reaches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pynvml
import torch

from rowferry._bench.link import CopySpeed, copy_speed
from rowferry.stores._devices import cuda_facts, device_for

from ._link import Link, driver_version, limit_gigabytes, link, nvml
from ._output import share


class Gpu(NamedTuple):
    """The GPU in use, as measured; a problem in place of what could not be had."""

    facts: dict[str, str | int]
    link: Link | None
    link_problem: str | None
    speed: CopySpeed | None
    speed_problem: str | None


def driver() -> tuple[str | None, str | None]:
    """``(version, None)`` of NVIDIA's driver, or ``(None, why none answers)``."""
    try:
        with nvml():
            return driver_version(), None
    except pynvml.NVMLError as error:
        return None, str(error)


def examine(device: torch.device) -> Gpu:
    """Measure the copies of a CUDA device, then ask NVML for its link, which the copies have woken."""
    facts = cuda_facts(device)
    speed = speed_problem = found = link_problem = None
    try:
        speed = copy_speed(device_for(device))
    except (MemoryError, RuntimeError) as error:  # no room, or a limit on pinning: a finding like the others
        speed_problem = " ".join(str(error).split())
    try:
        with nvml():
            found = link(str(facts["uuid"]))
    except pynvml.NVMLError as error:
        link_problem = str(error)
    return Gpu(facts, found, link_problem, speed, speed_problem)


def as_json(gpu: Gpu) -> dict[str, Any]:
    limit = limit_gigabytes(gpu.link.max_generation, gpu.link.max_width) if gpu.link else None
    return {
        **gpu.facts,
        "link": {**gpu.link._asdict(), "limit_gigabytes_per_second": limit} if gpu.link else None,
        "link_problem": gpu.link_problem,
        "copy": {
            "to_device_gigabytes_per_second": gpu.speed.to_device,
            "to_host_gigabytes_per_second": gpu.speed.to_host,
            "to_device_share_of_limit": share(gpu.speed.to_device, limit) if limit else None,
            "to_host_share_of_limit": share(gpu.speed.to_host, limit) if limit else None,
            "both_gigabytes_per_second": gpu.speed.both,
            "copied_bytes": gpu.speed.copied_bytes,
        }
        if gpu.speed
        else None,
        "copy_problem": gpu.speed_problem,
    }
