"""One trained table: its stores, its place in an optimizer, its device. What RowTable and RowTables both stand on.

Guarantees:
- Columns of state are made when training begins, not before; a table that is only looked at has none.
- What is read on demand is behind all that was written: the live pipeline is drained first.

Assumes:
- One thread uses a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._casts import cast, castable
from rowferry.stores._devices import resolve_device
from rowferry.stores._rows import check_index

from ._chosen import Learnt
from ._table_optimizer import Binding, OptimizerLike
from ._table_padding import as_ids, spread_over
from ._table_resume import committed_table
from ._table_rounding import round_stochastically, rounds
from ._table_state import check_state, make_state, open_writable
from .loader import Pipeline

Rounding = Literal["nearest", "stochastic"]
DeviceLike = torch.device | str | int | None


def weight_dtype(store: Store) -> torch.dtype:
    """What a batch's weight has: the store's dtype, float32 for narrower ones.

    Raises:
        TypeError: rows that have no gradient.
    """
    if not store.dtype.is_floating_point:
        raise TypeError(f"{store.name} has {store.dtype} rows, which cannot be trained; a RowTable needs a floating dtype")
    return torch.float32 if store.dtype.itemsize < 4 else store.dtype


def refuse_several_ranks() -> None:
    """Raise RuntimeError in a distributed run: nobody would bring the ranks' rows together."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"RowTable works in one process for now, and this run has {distributed.get_world_size()} ranks; train the table "
            "in one of them"
        )


@final
class Core:
    """See the module. Attributes are what RowTable was given, or what has become of it.

    Attributes:
        dtype: of lookups. weight_dtype: of a batch's weight.
        columns: the stores of the optimizer's state; None until training begins.
        saved_scalars: counters of a loaded table, until the optimizer's own can be made of them.
        served: batches given out for training so far, over all epochs.
        device: None until it is fixed.
        learnt: which ways of moving its columns are fast, in training and not: each call of ``batches`` goes on with that.
    """

    def __init__(
        self,
        weights: Any,
        optimizer: OptimizerLike,
        optimizer_args: Mapping[str, Any] | None,
        *,
        state: Any,
        padding: int | None,
        dtype: torch.dtype | None,
        device: DeviceLike,
        rounding: Rounding,
        seed: int,
        resume: bool = False,
    ) -> None:
        refuse_several_ranks()
        check_state(state)
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is {rounding!r}; it must be 'nearest' or 'stochastic'")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is {seed!r}; it must be an integer")
        resolved = None if device is None else resolve_device(device)
        self.weights = open_writable(weights)
        self.weight_dtype = weight_dtype(self.weights)
        if dtype is not None:
            castable(self.weights.dtype, dtype)
        self.dtype = dtype or self.weights.dtype
        self.padding = _checked_padding(padding, len(self.weights))
        self.rounding, self.seed, self.served = rounding, seed, 0
        self.columns: dict[str, Store] | None = None
        self.saved_scalars: dict[str, float] | None = None
        self._state, self._resume = state, resume
        self.learnt: dict[bool, list[list[Learnt | None]]] = {}
        self._pipe: weakref.ref[Pipeline] | None = None
        if resume:
            self.saved_scalars, self.served = committed_table(self.weights, state)
        try:  # after all other checks: it joins a group
            self.binding = Binding(optimizer, optimizer_args, self.weights.row_shape, self.weight_dtype)
        except BaseException:
            if self.weights is not weights:
                self.weights.close()  # opened here, and locked
            raise
        self.device: torch.device | None = None
        if resolved is not None:
            self.fix(resolved)

    def fix(self, device: DeviceLike) -> torch.device:
        """The table's device: ``device``, the one fixed before, or the default.

        Raises:
            ValueError: another one than was fixed before, or one that this machine does not have.
        """
        if device is None and self.device is not None:
            return self.device
        wanted = resolve_device(device)
        if self.device is None:
            self.device = wanted
            self.binding.fix(wanted)
        elif wanted != self.device:
            raise ValueError(
                f"the table of {self.weights.name} is on {self.device} and cannot be used on {wanted}; make another table, or "
                "save this one and load it there"
            )
        return self.device

    def begin_training(self) -> None:
        """Columns exist, the optimizer's state is known, and no earlier pipeline writes the table.

        Raises:
            PermissionError: the weights are read-only. TypeError: state that is not rows and scalars. ValueError: loaded
            columns that this optimizer does not keep.
        """
        refuse_several_ranks()
        if not self.weights.writable:
            raise PermissionError(f"{self.weights.name} is read-only; open it with mode='r+' to train, or pass train=False")
        self.end_pipeline()
        specs = self.binding.schema()
        if self.columns is None:
            self.columns = make_state(self._state, self.weights, specs.columns, fill=not self._resume)
        fit = {name: (store.row_shape, store.dtype) for name, store in self.columns.items()}
        wanted = {name: (spec.row_shape, spec.dtype) for name, spec in specs.columns.items()}
        unlike = self.saved_scalars is not None and set(self.saved_scalars) != set(specs.scalars)
        if fit != wanted or unlike:
            have = sorted((*fit, *(self.saved_scalars or ())))
            raise ValueError(
                f"the table has the state {have}, and {type(self.binding.optimizer).__name__} "
                f"keeps {sorted((*wanted, *specs.scalars))}. Load it with the optimizer and settings that it was saved with"
            )
        if self.saved_scalars is not None:
            self.binding.restore(self.saved_scalars)
            self.saved_scalars = None

    def stores(self) -> dict[str, Store]:
        """Weights and state by column."""
        return {"weight": self.weights, **(self.columns or {})}

    def numbers(self) -> dict[str, float] | None:
        """The table's scalars as plain numbers; None before the first step. The host waits where they are on a GPU."""
        if self.saved_scalars is not None or self.binding.scalars is None:
            return self.saved_scalars
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in self.binding.scalars.items()}

    # ---- the live pipeline --------------------------------------------------------------------------------

    def writes_through(self, pipe: Pipeline) -> None:
        """``pipe`` writes the table from now on."""
        self._pipe = weakref.ref(pipe)

    def release(self, pipe: Pipeline) -> None:
        """Unbind the batch of ``pipe``; a later pipeline's batch stays bound."""
        if self._pipe is not None and self._pipe() is pipe:
            self.binding.release()

    def end_pipeline(self) -> None:
        """Close the pipeline that wrote the table, with all that was written landed."""
        pipe = self._pipe() if self._pipe is not None else None
        self._pipe = None
        self.binding.release()
        if pipe is not None:
            pipe.close()

    def flush(self, sync: bool) -> None:
        """All that was written is in the stores, and they are flushed."""
        pipe = self._pipe() if self._pipe is not None else None
        if pipe is not None and not pipe._closed:
            pipe.flush(sync)
            return
        for store in self.stores().values():
            if store.writable:
                store.flush(sync)

    def land(self) -> None:
        """All that was written can be read from the stores. No commit."""
        pipe = self._pipe() if self._pipe is not None else None
        if pipe is not None and not pipe._closed:
            pipe._land()

    # ---- values -------------------------------------------------------------------------------------------

    def rounded(self, weight: Tensor, rows: Tensor, batch: int) -> Tensor:
        """``weight`` as it is written back: in the store's dtype where dice decide, else as it is (the store rounds)."""
        if self.rounding == "nearest" or not rounds(self.weights.dtype):
            return weight
        return round_stochastically(weight, self.weights.dtype, rows=rows, seed=self.seed, batch=batch)

    def lookup(self, ids: Any, device: DeviceLike) -> Tensor:
        """See ``RowTable.lookup``."""
        target = self.fix(device)
        kept = None
        if self.padding is not None:
            ids = as_ids(ids, len(self.weights))
            if isinstance(ids, Tensor):
                kept = ids != self.padding
                ids = ids[kept]
        rows, shape = check_index(ids, len(self.weights), self.weights.name, negative=False)
        self.land()
        found = self.weights.read(rows, target).view(*shape, *self.weights.row_shape)
        if kept is not None:
            found = spread_over(kept.to(target), found, 0)
        return cast(found, self.dtype)


def _checked_padding(padding: Any, rows: int) -> int | None:
    if padding is None:
        return None
    if isinstance(padding, bool) or not isinstance(padding, int):
        raise TypeError(f"padding is {padding!r}; it must be an id or None")
    if not -1 <= padding < rows:
        raise ValueError(f"padding is {padding}; it must be -1, or a row of the table's {rows}")
    return padding
