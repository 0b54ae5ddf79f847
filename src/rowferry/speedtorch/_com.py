"""Co-occurrence matrices: a square of zeros in each kind of memory, for a script to count in."""

from __future__ import annotations

from typing import Any, final

import torch

from ._common import Holder, _Common, _CommonMM, _CPUPytorchCommon, _GPUPytorchCommon, _PytorchCommon
from ._homes import cupy_home, torch_dtype


class Matrix(Holder):
    """What all of them do."""

    def _set_up(self, total_classes: int, datatype: Any) -> None:
        super().__init__()
        self.total_classes, self.datatype = total_classes, datatype
        self._dtype = torch_dtype(datatype)

    def _zeros(self) -> None:
        self._make((self.total_classes, self.total_classes), self._dtype)


@final
class COM(Matrix, _Common):
    """A matrix on the GPU, or with ``CPUPinn`` in pinned memory."""

    def __init__(self, total_classes: int, datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        self._set_up(total_classes, datatype)
        self.CPUPinn = CPUPinn

    def comInit(self, CPUPinn: bool = False) -> None:
        """All 0. Pinned when this or the constructor says so."""
        self._home = cupy_home(CPUPinn or self.CPUPinn)
        self._zeros()

    @property
    def CUPYCom(self) -> Any:
        """The matrix as an array over its memory."""
        return self.getCupyVar()


@final
class COMMM(Matrix, _CommonMM):
    """A matrix in ``<diskname>N.memmap.cpy.npy``, N being the first free number."""

    def __init__(self, total_classes: int, diskname: str = "COM", datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        self._set_up(total_classes, datatype)
        self.diskname = self._diskname = diskname
        self.CPUPinn = CPUPinn

    def comInit(self, CPUPinn: bool = False) -> None:
        """All 0. Pinning is not of files."""
        del CPUPinn
        self._zeros()

    @property
    def CUPYCom(self) -> Any:
        """The matrix as a NumPy array over the mapped file."""
        return self.getCupyVar()


class TorchMatrix(Matrix):
    """What the PyTorch ones share."""

    def __init__(self, total_classes: int, datatype: Any = torch.int32) -> None:
        self._set_up(total_classes, datatype)

    def comInit(self) -> None:
        """All 0."""
        self._zeros()


@final
class GPUPytorchCOM(TorchMatrix, _GPUPytorchCommon):
    """A matrix on the GPU."""


@final
class CPUPytorchCOM(TorchMatrix, _CPUPytorchCommon):
    """A matrix in pinned memory."""


@final
class PytorchCOM(TorchMatrix, _PytorchCommon):
    """A matrix on the GPU."""
