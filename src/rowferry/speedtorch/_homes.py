"""Where a switcher's rows live, and the stores that are made there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from rowferry.stores import ArrayStore, DeviceStore, PinnedStore, Store, create_store
from rowferry.stores._devices import default_device, resolve_device


@final
@dataclass(frozen=True)
class Home:
    """``device``: memory of the GPU; ``pinned``: page-locked memory; ``host``: ordinary memory; ``disk``: files.

    Attributes:
        kind: which of them.
        target: where rows go when the parameter that takes them is on the CPU, and what ``device`` means: a device, or
            None for the current CUDA device if there is one, else the CPU.
    """

    kind: Literal["device", "pinned", "host", "disk"]
    target: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """``target``, resolved."""
        return default_device() if self.target is None else self.target

    def make(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> Store:
        """A store of zeros. On disk ``name`` is the path of a new file."""
        if self.kind == "device":
            return DeviceStore.zeros(shape, dtype, device=self.device, name=name)
        if self.kind == "pinned":
            return PinnedStore.zeros(shape, dtype, name=name)
        if self.kind == "host":
            return ArrayStore(torch.zeros(tuple(shape), dtype=dtype), name=name)
        return create_store(name, shape, dtype)


def cupy_home(pinned: bool) -> Home:
    """Of the classes that were CuPy's."""
    return Home("pinned" if pinned else "device")


def torch_home(device_type: Any, pinned: bool) -> Home:
    """Of ``deviceType`` and ``pinType``. A GPU that is not there is the CPU; pinning is of host memory alone."""
    if torch.device(device_type).type == "cpu":
        return Home("pinned" if pinned else "host", torch.device("cpu"))
    if default_device().type == "cpu":
        return Home("device")
    return Home("device", resolve_device(device_type))


def torch_dtype(given: Any) -> torch.dtype:
    """A dtype given as a string, a NumPy dtype or a torch one.

    Raises:
        TypeError: torch has none like it.
    """
    if isinstance(given, torch.dtype):
        return given
    named = getattr(torch, given, None) if isinstance(given, str) else None
    if isinstance(named, torch.dtype):
        return named
    try:
        return torch.from_numpy(np.empty(0, np.dtype(given).newbyteorder("="))).dtype
    except TypeError as error:
        raise TypeError(f"torch has no dtype like {given!r}; pass 'float32', numpy.float32 or torch.float32, say") from error


def free_files(diskname: str, variables: Sequence[str] = ("",)) -> list[str]:
    """``<diskname>N.memmap<variable>.cpy.npy`` for each variable, N being the first number that no such file has."""
    for number in itertools.count():
        names = [f"{diskname}{number}.memmap{variable}.cpy.npy" for variable in variables]
        if not any(Path(name).exists() for name in names):
            return names
    raise AssertionError("there is always another number")
