"""A table's place in a torch optimizer: each batch's weight is bound into a parameter group, with its state.

Guarantees:
- The optimizer is the real one: schedulers, ``GradScaler.unscale_`` and clipping see the bound weight as any parameter.
- Outside a batch an empty placeholder without state stands in the group, so that a step moves nothing and the
  optimizer's ``state_dict`` holds hyperparameters and other parameters only.
- Scalars (step counts) are handed out as copies and taken back by ``commit`` alone: a batch that is not written back
  moves no counter.

Assumes:
- One thread uses a table and its optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._table_probe import Schema, as_sparse, like, probe, refuse_by_name, wants_sparse

OptimizerLike = Callable[..., Optimizer] | Optimizer


@final
class Binding:
    """What a RowTable has in an optimizer.

    Args:
        optimizer: a class or factory, called with a list of parameters and ``settings``; or an existing optimizer, to
            which a group with ``settings`` is added.
        settings: keywords of the constructor, or of the group.
        row_shape, dtype: of the weights that will be bound.

    Raises:
        TypeError: no optimizer, or one whose state is not rows and scalars.
    """

    def __init__(
        self, optimizer: OptimizerLike, settings: Mapping[str, Any] | None, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._row_shape, self._dtype = row_shape, dtype
        self._bound = self._placeholder(torch.device("cpu"))  # what stands in the group now
        self._real = 0  # rows of the bound weight that the store has; those after them are padding
        self._holds = False  # a batch's weight stands there, not the placeholder
        self._schema: Schema | None = None
        self.scalars: dict[str, Any] | None = None
        """The table's own state, as the optimizer keeps it; None before the first step that makes it."""
        settings = dict(settings or {})
        self.owned = not isinstance(optimizer, Optimizer)
        """Whether the optimizer was made here, for this table."""
        if isinstance(optimizer, Optimizer):
            refuse_by_name(type(optimizer))
            optimizer.add_param_group({"params": [self._bound], **settings})
            self.optimizer = optimizer
        else:
            self.optimizer = _made(optimizer, [self._bound], settings)
        self._make = self._maker(optimizer, settings)
        self.optimizer.state.pop(self._bound, None)  # Adagrad makes state at once
        reference = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del optimizer, args, kwargs
            binding = reference()
            if binding is not None:
                binding.prepare()

        self._hook = self.optimizer.register_step_pre_hook(before_step)
        weakref.finalize(self, self._hook.remove)

    def _maker(self, optimizer: OptimizerLike, settings: dict[str, Any]) -> Callable[[list[Tensor]], Optimizer]:
        """Makes optimizers like this one, for the probe."""
        if not isinstance(optimizer, Optimizer):
            return lambda params: _made(optimizer, params, settings)
        return lambda params: like(optimizer, self.group)(params)

    @property
    def group(self) -> dict[str, Any]:
        """The table's parameter group, found anew each time: ``load_state_dict`` makes new ones."""
        for group in self.optimizer.param_groups:
            if any(param is self._bound for param in group["params"]):
                return group
        raise RuntimeError(
            "the table's parameter group is gone from its optimizer; add no code that replaces param_groups, or make the "
            "table anew"
        )

    def fix(self, device: torch.device) -> None:
        """The table's device is known: the placeholder goes there."""
        self._swap(self._placeholder(device))

    def schema(self) -> Schema:
        """The optimizer's state, probed once, on the device of ``fix``.

        Raises:
            TypeError: state that is neither rows nor scalars.
        """
        if self._schema is None:
            self._schema = probe(self._make, self._row_shape, self._dtype, self._bound.device)
            first = self._schema.initial_scalars
            if self.scalars is None and first is not None:
                self.restore(first)
        return self._schema

    def restore(self, values: Mapping[str, float]) -> None:
        """Scalars from plain numbers, put where this optimizer wants them."""
        specs = self.schema().scalars
        self.scalars = {name: specs[name].make(value) for name, value in values.items()}

    # ---- one batch ------------------------------------------------------------------------------------------

    def bind(self, weight: Tensor, real: int, columns: Mapping[str, Tensor]) -> None:
        """``weight``, a leaf of which the first ``real`` rows are the table's, takes part in steps from now on."""
        self._swap(weight)
        self._real, self._holds = real, True
        if self.scalars is not None:
            copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.scalars.items()}
            self.optimizer.state[weight] = {**columns, **copies}

    def is_bound(self, weight: Tensor) -> bool:
        """Whether ``weight`` is the one that stands in the group."""
        return self._bound is weight

    def prepare(self) -> None:
        """Just before a step: no gradient for a batch without rows; a sparse one where only that is taken."""
        weight = self._bound
        if not self._real:
            weight.grad = None
        elif weight.grad is not None and wants_sparse(self.optimizer) and not weight.grad.is_sparse:
            weight.grad = as_sparse(weight.grad)

    def columns(self) -> dict[str, Tensor]:
        """The bound weight's state by column, without padding. Those that no step has made yet are missing.

        Raises:
            RuntimeError: state that the probe did not find.
        """
        specs = self.schema()
        state = self.optimizer.state.get(self._bound, {})
        for name, value in state.items():
            if name not in specs.columns and name not in specs.scalars and value is not None:
                raise RuntimeError(
                    f"the optimizer keeps {name!r} now, which it did not when the table began; settings that add state (such "
                    "as momentum from 0) must be set before the first batch"
                )
        return {name: state[name][: self._real] for name in specs.columns if state.get(name) is not None}

    def commit(self) -> None:
        """The bound batch was written back: its counters are the table's now, and the placeholder is bound again."""
        state = self.optimizer.state.get(self._bound)
        if state:
            self.scalars = {name: state[name] for name in self.schema().scalars if name in state}
        self.release()

    def release(self) -> None:
        """The placeholder is bound; what was is forgotten with its state."""
        if self._holds:
            self._swap(self._placeholder(self._bound.device))
            self._real, self._holds = 0, False

    def has_gradient(self) -> bool:
        """Whether a step would move anything, of this table or of what else the optimizer has."""
        return any(param.grad is not None for group in self.optimizer.param_groups for param in group["params"])

    def _swap(self, new: Tensor) -> None:
        old, params = self._bound, self.group["params"]
        self.optimizer.state.pop(old, None)
        params[next(place for place, param in enumerate(params) if param is old)] = new
        self._bound = new

    def _placeholder(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((0, *self._row_shape), dtype=self._dtype, device=device, requires_grad=True)


def _made(factory: Callable[..., Optimizer], params: list[Tensor], settings: dict[str, Any]) -> Optimizer:
    if isinstance(factory, type):
        refuse_by_name(factory)
    elif not callable(factory):
        raise TypeError(
            f"optimizer is a {type(factory).__name__}; it must be an optimizer class, a factory called with a list of "
            "parameters, or an optimizer"
        )
    made = factory(params, **settings)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer= made a {type(made).__name__}; it must make a torch.optim.Optimizer")
    refuse_by_name(type(made))
    return made
