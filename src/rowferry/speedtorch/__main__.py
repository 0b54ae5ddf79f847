"""``python -m rowferry.speedtorch script.py [arguments]``: runs a SpeedTorch script with no line changed."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import rowferry.speedtorch
from rowferry.stores._kernels import why_unavailable

MODULES = ("CUPYLive", "CPUCupyPinned", "GPUTorch", "CPUTorchPinned", "GenTorch")
USAGE = "usage: python -m rowferry.speedtorch script.py [arguments of the script]"


class MissingCupy(ModuleType):
    """Stands for CuPy in scripts that import it first, as they were told to, where it is not installed.

    Libraries that ask whether an array is CuPy's get a class that nothing is of.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.ndarray = self.generic = type("ndarray", (), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f'the script uses cupy.{name}, and CuPy is not installed; pip install "rowferry[cuda12]"')


def main(arguments: list[str]) -> int:
    """Run the script named first, as the main module, with the rest as its arguments; what it raises is passed on."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 0 if arguments else 2
    for name in ("SpeedTorch", *(f"SpeedTorch.{module}" for module in MODULES)):
        sys.modules[name] = rowferry.speedtorch
    if importlib.util.find_spec("cupy") is None:
        why_unavailable()  # found out and kept, before there is something that looks like CuPy
        sys.modules["cupy"] = MissingCupy("cupy")
    sys.argv = list(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
