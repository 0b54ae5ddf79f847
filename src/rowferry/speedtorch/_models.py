"""Model switchers: a table of weights, and an embedding that is fed the rows of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from ._common import Holder, _Common, _CommonMM, _CPUPytorchCommon, _GPUPytorchCommon, _PytorchCommon
from ._homes import cupy_home, torch_dtype, torch_home
from ._views import torch_view


class Model(Holder):
    """What all model switchers do. ``model_variable`` is a module with a ``weight``: an ``nn.Embedding`` of any length."""

    def _set_up(self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any) -> None:
        super().__init__()
        self.model_variable = model_variable
        self.total_classes, self.embed_dimension = total_classes, embed_dimension
        self.datatype = datatype
        self._dtype = torch_dtype(datatype)

    def zerosInit(self) -> None:
        """All rows 0."""
        self._make((self.total_classes, self.embed_dimension), self._dtype)

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Rows drawn from [low, high), by torch's default CPU generator, in pieces: no second table's worth of memory."""
        self.zerosInit()
        self._stores["weight"].init_(nn.init.uniform_, low, high)

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Rows drawn from a normal distribution, as ``uniformDistributionInit`` draws."""
        self.zerosInit()
        self._stores["weight"].init_(nn.init.normal_, mean, stdDev)

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """The slot numbers to feed the model: int64 ``(batchSize, posPerBatch)``; with ``negPerBatch`` a pair, the second
        ``(batchSize, negPerBatch)`` and counting on."""
        positives = batchSize * posPerBatch
        first = np.arange(positives).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return first
        return first, np.arange(positives, positives + batchSize * negPerBatch).reshape(batchSize, negPerBatch)

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """``model_variable.weight.data``: a fresh tensor with one row a slot, on the parameter's GPU (else the default one).

        Raises:
            IndexError: a row is out of range.
        """
        rows = self._getReshapedRetrieval(retrievedPosIndexes, retrievedNegIndexes)
        point(self.model_variable.weight, self._read("weight", rows, self._target()))

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the rows back; of a row in several slots the last slot's. The next read sees them. The host does not wait
        where rows are on the GPU, or in pinned memory with CuPy.

        Raises:
            ValueError: as many rows as slots are needed.
        """
        rows = self._getReshapedRetrieval(retrievedPosIndexes, retrievedNegIndexes)
        self._write("weight", rows, self.model_variable.weight.data)

    def _target(self) -> torch.device:
        here: Tensor = self.model_variable.weight
        return here.device if here.is_cuda else self._home.device


def point(parameter: Tensor, rows: Tensor) -> None:
    """``parameter.data = rows``, also where the number of rows is another one and the last step's graph is still alive.

    torch keeps the node that takes a parameter's gradient, with its shape, as long as a graph has it; data of another type
    make it forget that node. A gradient of another shape is of no use.
    """
    if rows.shape != parameter.shape:
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=torch.float64 if rows.dtype != torch.float64 else torch.float32)
    parameter.data = rows


class TorchModel(Model):
    """What the PyTorch ones have besides."""

    def __init__(self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = torch.float) -> None:
        self._set_up(model_variable, total_classes, embed_dimension, datatype)

    def customInit(self, initFunction: Callable[..., Any], *args: Any) -> None:
        """``initFunction(table, *args)`` changes the whole table in place."""
        self.zerosInit()
        with torch.no_grad():
            initFunction(torch_view(self._stores["weight"]), *args)


@final
class ModelFactory(Model, _Common):
    """Rows on the GPU, or with ``CPUPinn`` in pinned memory."""

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = "float32", CPUPinn: bool = False
    ) -> None:
        self._set_up(model_variable, total_classes, embed_dimension, datatype)
        self.CPUPinn = CPUPinn
        self._home = cupy_home(CPUPinn)


@final
class ModelFactoryMM(Model, _CommonMM):
    """Rows in ``<diskname>N.memmap.cpy.npy``, N being the first free number. ``CPUPinn`` makes no difference: rows cross by
    way of pinned memory anyhow."""

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        diskname: str = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        self._set_up(model_variable, total_classes, embed_dimension, datatype)
        self.diskname = self._diskname = diskname
        self.CPUPinn = CPUPinn


@final
class GPUPytorchModelFactory(TorchModel, _GPUPytorchCommon):
    """Rows on the GPU."""


@final
class CPUPytorchModelFactory(TorchModel, _CPUPytorchCommon):
    """Rows in pinned memory."""


@final
class PytorchModelFactory(TorchModel, _PytorchCommon):
    """Rows on ``deviceType``; on the CPU in pinned memory with ``pinType``."""

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        deviceType: Any = "cuda",
        pinType: bool = False,
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype)
        self.deviceType, self.pinType = deviceType, pinType
        self._home = torch_home(deviceType, pinType)
