"""RowTable: training a table that lives outside the GPU. RowTables: several of them from one stream of items."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Unpack, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from rowferry.stores import Store

from . import _table_save
from ._table_core import Core, DeviceLike, Rounding
from ._table_epoch import ONLY, Moving, TableBatches


@final
class RowTable:
    """A trained table in a store, with its optimizer's state in stores beside it; batches of rows go to the device.

    Each batch has a fresh leaf ``batch.weight`` with the rows it needs, bound into ``table.optimizer``;
    ``batch.step()`` updates them and writes weight and state back. Meaning, for any lookahead:
    ``p = W[rows]; s = S[rows]; optimizer.step(); W[rows] = p; S[rows] = s``. So weight decay, momentum and decay of moments
    touch the rows of the batch alone, and step counts are the table's, one a step: a row first met at step 100 is
    corrected for 100 steps, as in torch's SparseAdam.

    Args:
        weights: a store, an array, or a path (opened to read and write); any floating dtype.
        optimizer: a class of ``torch.optim``, or a factory, called with a list of parameters and ``optimizer_args``; or an
            existing optimizer, to which a group with ``optimizer_args`` is added. Its state must be rows and scalars:
            Adafactor, Muon and LBFGS are refused.
        state: where the state goes: None (page-locked memory; the device's where the weights are there), "like weights",
            a folder, or a dict of stores by column (overwritten with initial values). In the optimizer's dtype.
        padding: an id that stands for nothing: a zero row, no gradient, no transfer. Of negative ids only -1, as padding,
            is allowed.
        dtype: what lookups are cast to; the store's when None.
        device: where batches go. When None, the first ``batches`` or ``lookup`` fixes it.
        rounding: how weights are rounded to a half-precision store: "nearest", or "stochastic", by dice that depend on
            (seed, batch, row, element) alone. State is never rounded.
        seed: of stochastic rounding.
        resume: weights and state are what the last ``flush`` committed together, in stores with ``durability="atomic"``: go on
            from there, counters and all. ``state`` is then a dict of stores, and nothing is overwritten.

    Raises:
        TypeError, ValueError: arguments that cannot be. RuntimeError: in a run of several ranks.

    Threads: one thread uses a table and its optimizer; pipelines start their own (see Pipeline).
    """

    def __init__(
        self,
        weights: Any,
        optimizer: Callable[..., Optimizer] | Optimizer = torch.optim.Adam,
        optimizer_args: Mapping[str, Any] | None = None,
        state: Any = None,
        padding: int | None = None,
        dtype: torch.dtype | None = None,
        device: DeviceLike = None,
        *,
        rounding: Rounding = "nearest",
        seed: int = 0,
        resume: bool = False,
    ) -> None:
        self._core = Core(
            weights,
            optimizer,
            optimizer_args,
            state=state,
            padding=padding,
            dtype=dtype,
            device=device,
            rounding=rounding,
            seed=seed,
            resume=resume,
        )

    @property
    def optimizer(self) -> Optimizer:
        """The real torch optimizer: schedulers, ``unscale_`` and clipping work on it. Between batches it holds an empty
        placeholder for the table, so its ``state_dict`` has hyperparameters and other parameters only."""
        return self._core.binding.optimizer

    @property
    def weights(self) -> Store:
        """The store of the weights. Call ``flush()`` before you read it yourself."""
        return self._core.weights

    @property
    def state(self) -> dict[str, Store]:
        """The stores of the optimizer's state by column; empty before the first training batches."""
        return dict(self._core.columns or {})

    @property
    def scalars(self) -> dict[str, float]:
        """The optimizer's state of the table as a whole, such as ``step``, as of the last batch that was written back; empty
        before the first step. The host waits for values on a GPU."""
        return dict(self._core.numbers() or {})

    def batches(
        self,
        items: Any = None,
        *,
        index: Any = None,
        train: bool = True,
        pad_rows: int = 1,
        device: DeviceLike = None,
        **moving: Unpack[Moving],
    ) -> TableBatches:
        """Batches for ``items``, an epoch each time it is iterated.

        Args:
            items: an iterable of index batches, or of items with ``index``: a key or a callable that gives the ids.
            train: False gives batches to look at, of weights only; they see all that was written before they began.
            pad_rows: weight, gradient and state are rounded up to a multiple of it, with zero rows that are never stored.
            device: see RowTable.
            moving: the Pipeline's keywords: ``batch_size``, ``shuffle``, ``drop_last``, ``sampler``, ``seed``,
                ``lookahead``, ``depth``, ``staging_bytes``, ``threads``, ``mover``, ``count_inf``.

        Raises:
            PermissionError: the weights are read-only and ``train``. ValueError: another device than before; as Pipeline.
        """
        fixed = self._core.fix(device)
        return TableBatches(
            {ONLY: self._core}, items, index, train=train, pad_rows=checked_pad(pad_rows), device=fixed, moving=moving
        )

    def lookup(self, ids: Any, device: DeviceLike = None) -> Tensor:
        """Rows on demand, behind all that was written: ``ids.shape + row_shape`` in the table's dtype, no gradient.

        Raises:
            IndexError: an id out of range, or a negative one that is not the padding.
        """
        return self._core.lookup(ids, device)

    def flush(self, sync: bool = False) -> None:
        """Return when all rows written back so far, and their state, are in their stores. ``sync``: see Store.flush."""
        self._core.flush(sync)

    def save(self, path: str | os.PathLike[str], *, kind: _table_save.Kind = "npy") -> None:
        """Flush, then write weights, state and counters of this moment to a folder, in pieces of at most 64 MiB.

        The folder takes its place whole: at ``path`` there is the table saved before, or this one. What an existing
        optimizer holds besides the table (hyperparameters, other parameters) is in its own ``state_dict``.

        Args:
            path: a folder that does not exist, or one with a table that was saved before and nobody writes to.
            kind: a ``.npy`` or a ``.zarr`` a column.

        Raises:
            FileExistsError: something else is there. BlockingIOError: a store is open for writing in it.
        """
        _table_save.save(self._core, path, kind)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        store: Any = None,
        optimizer: Callable[..., Optimizer] | Optimizer | None = None,
        *,
        optimizer_args: Mapping[str, Any] | None = None,
        state: Any = None,
        device: DeviceLike = None,
    ) -> RowTable:
        """A table with the weights, state and counters of ``save``, copied in pieces of at most 64 MiB.

        Args:
            path: the folder. Nothing in it is changed or stays open.
            store: where the weights go: a store of their shape, a path (made if it does not exist), or None: page-locked
                memory.
            optimizer: None makes the class of ``torch.optim`` that was saved, with its settings of that time (and
                ``optimizer_args`` over them); else as in RowTable.
            state: where the state goes, as in RowTable.
            device: as in RowTable.

        Raises:
            FileNotFoundError, ValueError: no saved table, or one that is broken. When training begins, ValueError: the
            optimizer keeps other state than was saved.
        """
        saved = _table_save.read(path)
        settings = dict(optimizer_args or {})
        if optimizer is None:
            optimizer, settings = _table_save.optimizer_class(saved), {**_table_save.settings_of(saved), **settings}
        table = cls(
            _table_save.room_for(path, saved, store),
            optimizer,
            settings,
            state,
            saved.padding,
            _table_save.dtype_of(saved.dtype),
            device,
            rounding=saved.rounding,
            seed=saved.seed,
        )
        _table_save.restore(table._core, path, saved, state)
        return table

    def __repr__(self) -> str:
        core = self._core
        where = core.device or "no device yet"
        return f"<RowTable of {core.weights!r}, {type(self.optimizer).__name__}, on {where}, {core.served} batches trained>"


@final
class RowTables:
    """Several tables from one stream of items: each batch has rows of all of them, under one lookahead.

    Args:
        tables: RowTables by name. Their optimizers may be one.
    """

    def __init__(self, tables: Mapping[str, RowTable]) -> None:
        if not isinstance(tables, Mapping) or not tables:
            raise ValueError("RowTables takes a dict of at least one RowTable by name")
        for name, table in tables.items():
            if not isinstance(name, str) or not name or not isinstance(table, RowTable):
                raise TypeError(f"RowTables takes RowTables by name; {name!r} is a {type(table).__name__}")
        self._tables = dict(tables)

    def __getitem__(self, name: str) -> RowTable:
        return self._tables[name]

    def batches(
        self,
        items: Any,
        *,
        index: Mapping[str, Any],
        train: bool = True,
        pad_rows: int = 1,
        device: DeviceLike = None,
        **moving: Unpack[Moving],
    ) -> TableBatches:
        """Batches for ``items``: ``batch["u"].weight``; ``batch.step()`` steps each distinct optimizer once.

        Args:
            index: for each table a key or a callable that takes its ids from an item. Else as ``RowTable.batches``.

        Raises:
            ValueError: ``index`` names other tables; tables on different devices. Else as ``RowTable.batches``.
        """
        cores = {name: table._core for name, table in self._tables.items()}
        if not isinstance(index, Mapping) or set(index) != set(cores):
            raise ValueError(f"index must be a dict with a key or callable for each of {sorted(cores)}; it is {index!r}")
        fixed = {core.device for core in cores.values() if core.device is not None}
        wanted = device if device is not None else next(iter(fixed), None)
        targets = {core.fix(wanted) for core in cores.values()}
        return TableBatches(
            cores, items, index, train=train, pad_rows=checked_pad(pad_rows), device=targets.pop(), moving=moving
        )

    def flush(self, sync: bool = False) -> None:
        """``flush`` of each table."""
        for table in self._tables.values():
            table.flush(sync)

    def __repr__(self) -> str:
        return f"<RowTables {', '.join(f'{name}: {table!r}' for name, table in self._tables.items())}>"


def checked_pad(pad_rows: Any) -> int:
    """``pad_rows=`` checked.

    Raises:
        ValueError: not a positive integer.
    """
    if isinstance(pad_rows, bool) or not isinstance(pad_rows, int) or pad_rows < 1:
        raise ValueError(f"pad_rows is {pad_rows!r}; it must be a positive integer")
    return pad_rows
