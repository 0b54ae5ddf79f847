"""Ids that stand for nothing: taken out of an item's index before rows are asked for, and put back as zero rows.

They cost no transfer: the pipeline never sees them. Where they stood travels with the item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from rowferry.stores._rows import to_host

from ._sampling import rows_of


@dataclass
class PaddedItem:
    """A sampler's item on its way, and for each table with padding ids in it where the other ids are.

    Attributes:
        kept: bool, in the index's shape, by table; a table without padding ids in this item is missing.
    """

    item: Any
    number: int
    kept: dict[str, Tensor] = field(default_factory=dict)


@final
class Wrapped:
    """A sampler whose items come as ``PaddedItem``; all else about it (length, state, ``set_epoch``) is its own."""

    def __init__(self, origin: Iterable[Any]) -> None:
        self._origin = origin
        self._drawn: Iterator[Any] | None = None
        self._number = 0

    def __iter__(self) -> Wrapped:
        drawn = iter(self._origin)
        if drawn is self._origin:  # an iterator of its own: it can be drawn from once, and so can this
            self._drawn = drawn
            return self
        fresh = Wrapped(drawn)
        fresh._drawn = drawn
        return fresh

    def __next__(self) -> PaddedItem:
        assert self._drawn is not None
        item = PaddedItem(next(self._drawn), self._number)
        self._number += 1
        return item

    def __len__(self) -> int:
        return len(self._origin)  # type: ignore[arg-type]  # a TypeError where it has none, as it should be

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._origin, name)


@dataclass(frozen=True)
class Ids:
    """What ids of one table may be: ``rows`` of them, and ``padding``, which stands for nothing (None: no such id)."""

    rows: int
    padding: int | None


def real_ids(index: Any, table: str, allowed: Ids) -> Callable[[PaddedItem], Any]:
    """``index=`` for a pipeline over wrapped items: the ids of ``table`` without those that are its padding.

    Args:
        index: how the user takes the table's ids from an item: None (it is them), a key or a callable.
    """

    def ids(wrapped: PaddedItem) -> Any:
        found = rows_of(wrapped.item, index, wrapped.number) if index is not None else wrapped.item
        if allowed.padding is None:
            return found
        found = as_ids(found, allowed.rows)
        if not isinstance(found, Tensor):
            return found  # refused by the pipeline's own check
        kept = found != allowed.padding
        if bool(kept.all()):
            return found
        wrapped.kept[table] = kept
        return found[kept]

    return ids


def as_ids(index: Any, rows: int) -> Any:
    """An index of a table of ``rows`` rows as a tensor of its ids, on a device where it is on one; what is none, as it is."""
    if isinstance(index, Tensor) and index.device.type != "cpu" and index.dtype != torch.bool:
        return index
    array = to_host(index, rows)
    if array.dtype.kind == "b" and array.shape == (rows,):
        array = np.flatnonzero(array)
    if array.size == 0:
        array = array.astype(np.int64)  # an empty list has no integers
    return torch.from_numpy(array.astype(np.int64)) if array.dtype.kind in "iu" else index


def wrapped_index(index: Any, tables: Mapping[str, Ids], *, several: bool) -> Any:
    """``index=`` for a pipeline over wrapped items, of one table or of several."""
    if several:
        return {name: real_ids(index[name], name, allowed) for name, allowed in tables.items()}
    ((name, allowed),) = tables.items()
    return real_ids(index, name, allowed)


def spread_over(kept: Tensor, values: Tensor, fill: float) -> Tensor:
    """``values`` in order at the places of ``kept``, ``fill`` at the others: shape ``kept.shape + values.shape[1:]``.

    A fresh tensor on the current stream; no host sync.
    """
    full = values.new_full((*kept.shape, *values.shape[1:]), fill)
    mask = kept.view((*kept.shape, *(1,) * (values.dim() - 1))).expand(full.shape)
    return full.masked_scatter_(mask, values)
