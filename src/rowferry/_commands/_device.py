"""The device that a command runs on, and waiting for it."""

from __future__ import annotations

import torch

from rowferry._bench.clock import idle
from rowferry.stores._devices import device_for, resolve_device


def device_named(name: str | None) -> torch.device:
    """The device called ``name`` with its index; the current CUDA device if there is one, else the CPU, for None.

    Raises:
        ValueError: no such kind of device, or this machine has none.
    """
    try:
        return resolve_device(name)
    except RuntimeError as error:  # torch's word for a name that it can't parse
        raise ValueError(f"device {name!r} is not supported; use 'cpu', 'cuda' or 'cuda:1'") from error


def finish(device: torch.device) -> None:
    """Wait until what the current stream was given has run."""
    idle(device_for(device))
