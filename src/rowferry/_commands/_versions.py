"""Versions of what rowferry runs on, from package metadata: nothing is imported to ask."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_PACKAGES = ("numpy", "zarr", "nvidia-ml-py", "tensorstore", "obstore", "scikit-learn")


def own_version() -> str:
    """rowferry's version; says so when it runs from a checkout that is not installed."""
    return installed("rowferry") or "not installed, run from a checkout"


def installed(package: str) -> str | None:
    """Version of an installed package, None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cupy_package() -> tuple[str, str] | None:
    """``(package, version)`` of the CuPy that is installed, the first of ``CUPY_PACKAGES``; None without one."""
    for package in CUPY_PACKAGES:
        found = installed(package)
        if found:
            return package, found
    return None


def versions() -> dict[str, str | None]:
    """Version by name; None where something optional is not installed."""
    cupy = cupy_package()
    return {
        "rowferry": own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "cupy": f"{cupy[1]} ({cupy[0]})" if cupy else None,
        **{package: installed(package) for package in _PACKAGES},
    }
