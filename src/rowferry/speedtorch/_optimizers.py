"""Optimizer switchers: tables of an optimizer's state, and a parameter whose state is that of one batch's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from rowferry.pipeline._table_probe import like, probe, refuse_by_name

from ._common import Holder, _Common, _CommonMM, _CPUPytorchCommon, _GPUPytorchCommon, _PytorchCommon
from ._homes import cupy_home, torch_dtype, torch_home


class State(Holder):
    """What all optimizer switchers do. Which state is swapped is found as a RowTable finds it: what has an entry a row.

    Attributes:
        optVarList: the names of what is swapped, such as exp_avg and exp_avg_sq; the stores are in the same order.
        optimizerKey: the parameter's number in the optimizer's ``state_dict()``.
    """

    _several = True

    def _set_up(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any,
    ) -> None:
        """Find the parameter and its state.

        Raises:
            KeyError: the model has no such variable. ValueError: the optimizer does not hold it, or its rows are not
            ``embed_dimension`` wide. TypeError: the optimizer keeps state that is neither rows nor numbers.
        """
        super().__init__()
        refuse_by_name(type(given_optimizer))
        self.given_optimizer = given_optimizer
        self.total_classes, self.embed_dimension = total_classes, embed_dimension
        self.model, self.variable_name = model, variable_name
        self._diskname = variable_name
        self.datatype = self.dtype = dtype
        self._dtype = torch_dtype(dtype)
        self._parameter = _found(model, variable_name)
        if tuple(self._parameter.shape[1:]) != (embed_dimension,):
            raise ValueError(
                f"{variable_name} has rows of shape {tuple(self._parameter.shape[1:])}; embed_dimension is {embed_dimension}"
            )
        self._group()
        self._schema = self._probed()
        self.optVarList = list(self._schema.columns)

    @property
    def optimizerKey(self) -> int:
        """See the class."""
        held = [param for group in self.given_optimizer.param_groups for param in group["params"]]
        return next(place for place, param in enumerate(held) if param is self._parameter)

    def optInit(self) -> None:
        """All state 0, of Rprop's step sizes ``lr``: what a fresh optimizer would begin with."""
        self._make((self.total_classes, self.embed_dimension), self._dtype)
        for name, spec in self._schema.columns.items():
            if spec.initial and not isinstance(self.given_optimizer, torch.optim.Adagrad):  # whose sums always began at 0
                self._stores[name].init_(torch.nn.init.constant_, spec.initial)

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """The parameter's state: a row a slot. Step counts are the optimizer's own; before its first step they are 0."""
        rows = self._getReshapedRetrieval(retrievedPosIndexes, retrievedNegIndexes)
        state = self.given_optimizer.state[self._parameter]
        if not state:
            specs = self._probed()  # anew: the parameter may be on another device by now
            state.update({name: spec.make(specs.starting[name]) for name, spec in specs.scalars.items()})
        for name in self.optVarList:
            state[name] = self._read(name, rows, self._target(), self._parameter.dtype)

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the state back; of a row in several slots the last slot's, as of its weights. The next read sees it."""
        rows = self._getReshapedRetrieval(retrievedPosIndexes, retrievedNegIndexes)
        state = self.given_optimizer.state[self._parameter]
        for name in self.optVarList:
            self._write(name, rows, state[name])

    def _columns(self) -> Sequence[str]:
        return self.optVarList

    def _group(self) -> dict[str, Any]:
        for group in self.given_optimizer.param_groups:
            if any(param is self._parameter for param in group["params"]):
                return group
        raise ValueError(f"the optimizer does not hold {self.variable_name}; make it of model.parameters(), with that in it")

    def _probed(self) -> Any:
        here = self._parameter
        make: Callable[[list[Tensor]], Optimizer] = like(self.given_optimizer, self._group())
        return probe(make, tuple(here.shape[1:]), here.dtype, here.device)

    def _target(self) -> torch.device:
        here = self._parameter
        return here.device if here.is_cuda else self._home.device


def _found(model: torch.nn.Module, variable_name: str) -> torch.nn.Parameter:
    """The parameter by its module's dotted name (or its own), inside a DataParallel too.

    Raises:
        KeyError: the model has none of that name.
    """
    named = dict(model.named_parameters())
    for name in (f"{variable_name}.weight", variable_name, f"module.{variable_name}.weight", f"module.{variable_name}"):
        if name in named:
            return named[name]
    raise KeyError(f"the model has no variable {variable_name!r}; it has {', '.join(named)}")


class CupyState(State):
    """What those that were CuPy's are made of."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        self._set_up(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self.CPUPinn = CPUPinn
        if self._home.kind != "disk":
            self._home = cupy_home(CPUPinn)


class TorchState(State):
    """What the PyTorch ones are made of."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
    ) -> None:
        self._set_up(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)


@final
class OptimizerFactory(CupyState, _Common):
    """State on the GPU, or with ``CPUPinn`` in pinned memory."""

    @property
    def CUPYcorpi(self) -> Any:
        """The arrays over the state's memory, in the order of ``optVarList``."""
        return self.getCupyVar()


@final
class OptimizerFactoryMM(CupyState, _CommonMM):
    """State in ``<variable_name>N.memmap.<state>.cpy.npy``, N being the first number that none of these files has."""


@final
class GPUPytorchOptimizerFactory(TorchState, _GPUPytorchCommon):
    """State on the GPU."""


@final
class CPUPytorchOptimizerFactory(TorchState, _CPUPytorchCommon):
    """State in pinned memory."""


@final
class PytorchOptimizerFactory(TorchState, _PytorchCommon):
    """State on ``deviceType``; on the CPU in pinned memory with ``pinType``."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        deviceType: Any = "cuda",
        pinType: bool = False,
    ) -> None:
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self.deviceType, self.pinType = deviceType, pinType
        self._home = torch_home(deviceType, pinType)
