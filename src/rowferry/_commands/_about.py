"""What a result was measured on: machine, versions, date. Goes into every record."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch

from rowferry.stores._devices import cuda_facts

from ._gpu import driver
from ._versions import versions

_CPUINFO = Path("/proc/cpuinfo")


def about(device: torch.device) -> dict[str, Any]:
    """Facts by name, None where something is not there: ``gpu``, ``driver``, ``processor``, ``cores``, versions, ``date``."""
    return {
        "gpu": str(cuda_facts(device)["name"]) if device.type == "cuda" else None,
        "driver": driver()[0],
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **versions(),
    }


def processor(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name, ``unknown`` where Linux does not tell."""
    if not cpuinfo.exists():
        return "unknown"
    with cpuinfo.open(encoding="utf-8") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
