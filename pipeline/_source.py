"""What the user gave as ``source``: tables of columns, and how a batch gets the same structure back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from rowferry.stores import Store, as_store

Kind = Literal["one", "tuple", "dict"]


@dataclass(frozen=True)
class Column:
    """One store of a table. ``label`` is what errors and ``dtype=`` call it."""

    key: Any
    label: str
    store: Store
    dtype: torch.dtype
    """What batches of it have: the store's dtype, or the one it is cast to."""


@dataclass(frozen=True)
class Table:
    """Stores that share row numbers."""

    name: str
    rows: int
    columns: tuple[Column, ...]
    kind: Kind

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one row of all columns, in the stores' dtypes."""
        return sum(column.store.row_nbytes for column in self.columns)

    def build(self, values: Sequence[Any]) -> Any:
        """``values``, one a column, in the structure that the user gave for this table."""
        if self.kind == "one":
            return values[0]
        if self.kind == "tuple":
            return tuple(values)
        return {column.key: value for column, value in zip(self.columns, values, strict=True)}

    def named(self, values: Mapping[Any, Any] | Any) -> dict[int, Any]:
        """The user's ``values`` for some of the columns, by column number.

        Raises:
            KeyError: a column that the table does not have. TypeError: not of the table's structure.
        """
        if self.kind == "one":
            return {0: values}
        if self.kind == "tuple":
            if not isinstance(values, Sequence) or len(values) != len(self.columns):
                raise TypeError(
                    f"values for {self.name!r} must be a sequence of {len(self.columns)} tensors or None, one a column"
                )
            return {number: value for number, value in enumerate(values) if value is not None}
        if not isinstance(values, Mapping):
            raise TypeError(f"values for {self.name!r} must be a dict by column, not {type(values).__name__}")
        numbers = {column.key: number for number, column in enumerate(self.columns)}
        unknown = [key for key in values if key not in numbers]
        if unknown:
            raise KeyError(f"table {self.name!r} has no column {unknown[0]!r}; it has {', '.join(map(repr, numbers))}")
        return {numbers[key]: value for key, value in values.items()}


@dataclass(frozen=True)
class Source:
    """All tables of a pipeline. ``several``: the user named tables (``index`` is a dict); else there is one, unnamed."""

    tables: tuple[Table, ...]
    several: bool
    opened: tuple[Store, ...] = ()
    """Stores that were paths, and are nobody else's."""

    def build(self, per_table: Sequence[Any]) -> Any:
        """One value a table, in the user's structure: a dict by table, or the only table's value."""
        if not self.several:
            return per_table[0]
        return {table.name: value for table, value in zip(self.tables, per_table, strict=True)}

    def __str__(self) -> str:
        stores = ((column.label, column.store) for table in self.tables for column in table.columns)
        return ", ".join(f"{label} ({len(store):,} rows of {store.row_nbytes:,} bytes)" for label, store in stores)

    @property
    def stores(self) -> list[Store]:
        """Every store, table by table."""
        return [column.store for table in self.tables for column in table.columns]


def make_source(source: Any, index: Any, dtype: Any) -> Source:
    """Tables and columns of what the user passed to Pipeline.

    Args:
        source: one store (or what ``as_store`` takes), a tuple or a dict of them; with ``index`` a dict, a dict of
            tables, each one of the former.
        dtype: None, a torch dtype (casts floating columns), or a dict by column (with several tables by
            ``"table.column"``, or by table where that is one store).

    Raises:
        ValueError: no store, columns of different length, or tables that ``index`` does not match.
        TypeError: something that is no store, or a cast that cannot be.
    """
    casts = _Casts(dtype)
    if isinstance(index, Mapping):
        if not isinstance(source, Mapping) or set(source) != set(index):
            have = sorted(map(str, source)) if isinstance(source, Mapping) else type(source).__name__
            raise ValueError(
                f"index names the tables {sorted(map(str, index))}, so source must be a dict of just these; it has {have}"
            )
        if not source:
            raise ValueError("source has no table")
        tables = tuple(_table(str(name), source[name], casts, prefix=f"{name}.") for name in source)
        result = Source(tables, several=True)
    else:
        result = Source((_table("rows", source, casts, prefix=""),), several=False)
    casts.require_all_used()
    given = list(_members(source, several=result.several))
    opened = (store for store, member in zip(result.stores, given, strict=True) if isinstance(member, str | os.PathLike))
    return replace(result, opened=tuple(opened))


def _members(source: Any, *, several: bool) -> Iterator[Any]:
    """What the user gave for each store, table by table."""
    for table in source.values() if several else (source,):
        if isinstance(table, Mapping):
            yield from table.values()
        else:
            yield from table if isinstance(table, tuple) else (table,)


def _table(name: str, source: Any, casts: _Casts, prefix: str) -> Table:
    kind: Kind = "one"
    keys: Sequence[Any] = (None,)
    members: Sequence[Any] = (source,)
    if isinstance(source, Mapping):
        kind, keys, members = "dict", tuple(source), tuple(source.values())
    elif isinstance(source, tuple):
        kind, keys, members = "tuple", tuple(range(len(source))), source
    if not members:
        raise ValueError(f"table {name!r} has no column; pass at least one store")
    columns = []
    for key, member in zip(keys, members, strict=True):
        store = as_store(member)
        label = prefix.removesuffix(".") or store.name if key is None else f"{prefix}{key}"
        columns.append(Column(key, label, store, casts.target(key, label, store)))
    lengths = {column.label: len(column.store) for column in columns}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"columns of one table must have equal length, these have {lengths}; "
            "for tables with row numbers of their own pass index={table: key}"
        )
    return Table(name, len(columns[0].store), tuple(columns), kind)


class _Casts:
    """The ``dtype`` argument, asked column by column."""

    def __init__(self, dtype: Any) -> None:
        self._bare = dtype if isinstance(dtype, torch.dtype) else None
        self._by_column = dict(dtype) if isinstance(dtype, Mapping) else {}
        self._used: set[Any] = set()
        if dtype is not None and self._bare is None and not isinstance(dtype, Mapping):
            raise TypeError(f"dtype must be a torch dtype or a dict of them by column, not {dtype!r}")

    def target(self, key: Any, label: str, store: Store) -> torch.dtype:
        for name in (label, key):
            if name is not None and name in self._by_column:
                self._used.add(name)
                target = self._by_column[name]
                if not isinstance(target, torch.dtype):
                    raise TypeError(f"dtype[{name!r}] must be a torch dtype, not {target!r}")
                _require_castable(store, target)
                return target
        if self._bare is not None and store.dtype.is_floating_point:
            _require_castable(store, self._bare)
            return self._bare
        return store.dtype

    def require_all_used(self) -> None:
        unknown = [name for name in self._by_column if name not in self._used]
        if unknown:
            raise ValueError(f"dtype names {unknown[0]!r}, which is no column of source")


def _require_castable(store: Store, target: torch.dtype) -> None:
    from rowferry.stores._casts import castable  # kept beside the casts themselves

    if target != store.dtype:
        castable(store.dtype, target)
