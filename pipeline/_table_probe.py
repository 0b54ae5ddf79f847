"""What an optimizer keeps for a parameter, found by trying: which of it is a value a row, which one of the table.

A throwaway optimizer of the same class and settings steps two small parameters of different length, on the table's
device. What is 0-d (or a plain number) is a *scalar* of the table; what has as many entries as the parameter has rows is a
*column*; anything else is refused by name.

Initial values are those before the first update. The parameters and their gradients are zero, and each tensor that the
step changes in place is copied just before its first change: so Adamax's norm starts at 0 (not at the eps that its first
update leaves), Rprop's step sizes at lr, Adagrad's sums at ``initial_accumulator_value``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = {
    "Adafactor": "its second moments are factored over the whole matrix, not a value a row",
    "Muon": "it orthogonalises the whole matrix, so no row can be updated without the others",
    "LBFGS": "it keeps one history of all parameters and evaluates the loss again and again",
}
LENGTHS = (2, 3)

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@final
@dataclass(frozen=True)
class ColumnSpec:
    """State with an entry a row: what a store of it must look like, and what rows hold before their first update."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float


@final
@dataclass(frozen=True)
class ScalarSpec:
    """State of the table as a whole. ``dtype`` None: a plain number; else a 0-d tensor on ``device``."""

    dtype: torch.dtype | None
    device: torch.device

    def make(self, value: float) -> Any:
        """``value`` as the optimizer keeps it."""
        return value if self.dtype is None else torch.tensor(value, dtype=self.dtype, device=self.device)


@final
@dataclass(frozen=True)
class Schema:
    """An optimizer's state for one table, by name.

    Attributes:
        initial_scalars: values to begin with, of an optimizer that makes state when it is constructed (Adagrad); None
            where the first step makes it.
        starting: what each scalar is before its first update; of a plain number, which counts steps, one less than after.
    """

    columns: dict[str, ColumnSpec]
    scalars: dict[str, ScalarSpec]
    initial_scalars: dict[str, float] | None
    starting: dict[str, float]


def refuse_by_name(kind: type) -> None:
    """Raise TypeError for optimizers whose state or update is not row by row."""
    for base in kind.__mro__:
        if base.__name__ in REFUSED:
            raise TypeError(
                f"{kind.__name__} cannot train a RowTable: {REFUSED[base.__name__]}; use an optimizer that treats each "
                "element alone, such as Adam, Adagrad or SGD"
            )


def wants_sparse(optimizer: Optimizer) -> bool:
    """Whether it takes sparse gradients alone."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def as_sparse(gradient: Tensor) -> Tensor:
    """A dense gradient as a sparse one over all its rows. Copies no values."""
    rows = torch.arange(gradient.shape[0], device=gradient.device).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, gradient, gradient.shape, is_coalesced=True, check_invariants=False)


def constructor_settings(kind: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a parameter group's ``settings`` that the constructor of ``kind`` takes."""
    taken = inspect.signature(kind).parameters
    return {name: value for name, value in settings.items() if name in taken and name != "params"}


def like(optimizer: Optimizer, group: dict[str, Any]) -> MakeOptimizer:
    """Makes optimizers of the class of ``optimizer`` with the settings of ``group``, one of its parameter groups."""
    kind: Callable[..., Optimizer] = type(optimizer)

    def make(params: list[Tensor]) -> Optimizer:
        try:
            return kind(params, **constructor_settings(type(optimizer), group))
        except TypeError as error:
            error.add_note(f"a {type(optimizer).__name__} was made from the group's settings, to see what state it keeps")
            raise

    return make


def probe(make: MakeOptimizer, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Schema:
    """The state that optimizers of ``make`` keep for rows of ``row_shape`` and ``dtype`` on ``device``.

    Raises:
        TypeError: state that is neither an entry a row nor one value, or rows that start at different values.
    """
    with torch.inference_mode(False), torch.enable_grad():
        params = [torch.zeros((n, *row_shape), dtype=dtype, device=device, requires_grad=True) for n in LENGTHS]
        optimizer = make(params)
        kind = type(optimizer).__name__
        eager = bool(optimizer.state.get(params[0]))
        before = {id(param): dict(optimizer.state.get(param, {})) for param in params}
        initial_scalars = {name: _number(value) for name, value in before[id(params[0])].items() if _is_scalar(value)}
        for param in params:
            zero = torch.zeros_like(param)
            param.grad = as_sparse(zero) if wants_sparse(optimizer) else zero
        recorder = _FirstWrites()
        with recorder:
            optimizer.step()
        states = [{name: value for name, value in optimizer.state[param].items() if value is not None} for param in params]
    if set(states[0]) != set(states[1]):
        raise TypeError(f"{kind} keeps other state for a parameter of 2 rows than for one of 3; a RowTable cannot hold it")
    columns: dict[str, ColumnSpec] = {}
    scalars: dict[str, ScalarSpec] = {}
    starting: dict[str, float] = {}
    for name in states[0]:
        values = [state[name] for state in states]
        if all(map(_is_scalar, values)):
            scalars[name] = _scalar(values[0], device)
            first = values[0]
            starting[name] = recorder.initial(first).item() if isinstance(first, Tensor) else first - 1
        elif _is_column(values) and name != "weight":
            columns[name] = _column(kind, name, [recorder.initial(value) for value in values])
        else:
            raise TypeError(f"{kind} keeps {name!r} as {_said(values)}: neither a value a row nor one of the table")
    return Schema(columns, scalars, initial_scalars if eager else None, starting)


@final
class _FirstWrites(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Copies each tensor just before it is first changed in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        # By address; the tensor is kept too, so that its address is not used again.
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._blank: dict[int, Tensor] = {}  # uninitialised so far; held, so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    self._before(func._schema.name, tensor)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and func._schema.name in _BLANK:
            self._blank[made.untyped_storage().data_ptr()] = made
        return made

    def _before(self, name: str, tensor: Tensor) -> None:
        """``tensor`` is about to be changed by ``name``."""
        key = tensor.untyped_storage().data_ptr()
        blank = self._blank.pop(key, None) is not None
        if key in self._seen or (blank and name in _FIRST_VALUES):
            return
        # A buffer that is never read before it is written, as fused SGD's momentum, is as good as zero.
        self._seen[key] = (tensor, torch.zeros_like(tensor) if blank else tensor.detach().clone())

    def initial(self, tensor: Tensor) -> Tensor:
        """What ``tensor`` held before its first change."""
        seen = self._seen.get(tensor.untyped_storage().data_ptr())
        return tensor if seen is None else seen[1]


_BLANK = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"})
_FIRST_VALUES = frozenset({"aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_"})


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _is_column(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0 and value.shape[0] == n
        for value, n in zip(values, LENGTHS, strict=True)
    ) and len({value.shape[1:] for value in values}) == 1  # fmt: skip


def _scalar(value: Any, device: torch.device) -> ScalarSpec:
    return ScalarSpec(value.dtype, value.device) if isinstance(value, Tensor) else ScalarSpec(None, device)


def _column(kind: str, name: str, values: Sequence[Tensor]) -> ColumnSpec:
    flat = torch.cat([value.detach().reshape(-1) for value in values])
    initial = float(flat[0]) if flat.numel() else 0.0
    if flat.numel() and not bool((flat == flat[0]).all()):
        raise TypeError(f"{kind} starts {name!r} at different values for different rows; a RowTable cannot hold it")
    return ColumnSpec(tuple(values[0].shape[1:]), values[0].dtype, initial)


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _said(values: Sequence[Any]) -> str:
    shown = [f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__ for value in values]
    return f"{shown[0]} for 2 rows, {shown[1]} for 3"
