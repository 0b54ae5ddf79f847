"""Take what a launch was given as it is now, without keeping memory alive for it.

A kernel gets addresses and values when it is launched. The simulated device runs the launched function later, so it
must not see variables that were bound anew since, and it must not hold the tensors: on a real device a queued kernel
keeps no block from being given away. ``taken`` rebuilds the function over the values of its variables at launch, each
tensor of the device replaced by an alias that does not own its memory.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, final

import torch


def taken(fn: Callable[[], Any], alias: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """``fn`` over the present values of its variables, its tensors exchanged by ``alias``.

    Reaches tensors through closures, defaults, partials, bound methods, lists, tuples, dicts and dataclasses; what holds
    a tensor in any other way holds it until the function has run, which the device reports when it is the last holder.
    """
    result: Callable[[], Any] = _Taker(alias).take(fn)
    return result


@final
class _Taker:
    def __init__(self, alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._alias = alias
        self._seen: dict[int, Any] = {}  # a function may hold itself, a list too

    def take(self, value: Any) -> Any:
        """``value``, or a copy where something in it had to be exchanged."""
        if isinstance(value, torch.Tensor):
            return self._alias(value)
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._seen[id(value)] = self._rebuilt(value)
        return self._seen[id(value)]

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            owner = self.take(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            return functools.partial(self.take(value.func), *self.take(value.args), **self.take(value.keywords))
        if isinstance(value, (list, tuple)):
            items = [self.take(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            pairs = {key: self.take(item) for key, item in value.items()}
            return value if all(pairs[key] is item for key, item in value.items()) else pairs
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return value

    def _function(self, fn: types.FunctionType) -> Any:
        cells = tuple(self._cell(cell) for cell in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, self.take(fn.__defaults__), cells or None)
        new.__kwdefaults__ = self.take(fn.__kwdefaults__)
        return new

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            return types.CellType(self.take(cell.cell_contents))
        except ValueError:
            return cell  # a variable that is not bound yet

    def _dataclass(self, value: Any) -> Any:
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = self.take(old)
            if new is not old:
                changed[field.name] = new
        if not changed:
            return value
        result = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(result, name, new)  # frozen ones too
        return result
