"""The link between host and GPU, and the driver, as NVML tells of them. What copies reach is in ``_bench/link.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pynvml

# Transfers a lane and second in 1e9, and the share of the bits that is payload of the encoding, by PCIe generation.
_LANES = {1: (2.5, 8 / 10), 2: (5, 8 / 10), 3: (8, 128 / 130), 4: (16, 128 / 130), 5: (32, 128 / 130), 6: (64, 242 / 256)}


class Link(NamedTuple):
    """A PCIe link: what it is now and the most that card and slot could agree on."""

    generation: int
    width: int
    max_generation: int
    max_width: int


@contextlib.contextmanager
def nvml() -> Iterator[None]:
    """NVML, started for the block.

    Raises:
        pynvml.NVMLError: no driver, or one that does not answer.
    """
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """The NVIDIA driver's version, inside ``nvml()``."""
    return _text(pynvml.nvmlSystemGetDriverVersion())


def link(uuid: str) -> Link:
    """The link of the device that torch knows by ``uuid`` (without the GPU- before it), inside ``nvml()``.

    A link that rests runs at a lower generation: ask while something is copied.

    Raises:
        pynvml.NVMLError: NVML doesn't know the device, or a virtual machine hides the link.
    """
    handle = _handle(uuid)
    return Link(
        pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    )


def limit_gigabytes(generation: int, width: int) -> float | None:
    """GB/s that a PCIe link can carry one way, before the packets' own headers; None for a generation not known here."""
    if generation not in _LANES:
        return None
    transfers, payload = _LANES[generation]
    return transfers * payload * width / 8


def _handle(uuid: str) -> Any:
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        # A part of a card (MIG) has a name of its own; the link is the whole card's.
        part = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
