"""Where a table's optimizer state lives: one store a column, made to fit what the optimizer keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rowferry.stores import (
    ArrayStore,
    DeviceStore,
    MemmapStore,
    PinnedStore,
    Store,
    ZarrStore,
    as_store,
    create_store,
    open_store,
)

from ._table_probe import ColumnSpec

LIKE_WEIGHTS = "like weights"
FRESH = "state of an earlier run is not continued here; RowTable.load does that. Remove it, or choose another place"


def open_writable(obj: Any) -> Store:
    """A store over ``obj``; a path is opened to read and write."""
    return open_store(obj, "r+") if isinstance(obj, str | os.PathLike) else as_store(obj)


def check_state(state: Any) -> None:
    """Refuse what ``state=`` cannot be, before anything is made.

    Raises:
        TypeError: neither None, "like weights", a folder nor a dict by column.
    """
    if state is not None and not isinstance(state, str | os.PathLike | Mapping):
        raise TypeError(
            f"state is a {type(state).__name__}; it must be None (memory), {LIKE_WEIGHTS!r}, a folder, or a dict of stores "
            "by column"
        )


def make_state(state: Any, weights: Store, specs: Mapping[str, ColumnSpec], *, fill: bool = True) -> dict[str, Store]:
    """A store for each column, every row at its initial value.

    Args:
        state: None (page-locked memory; the device's where the weights are there), "like weights" (their kind of store;
            files get the column's name before the suffix), a folder (made if missing; a ``.npy`` a column), or a dict
            of stores, arrays or paths by column, which are filled with the initial values.
        fill: False leaves that to the caller, who sets all rows.

    Raises:
        ValueError: a dict with missing, unknown or unfit columns. FileExistsError: a file of the column's name exists.
        PermissionError: a store of the dict is read-only. Nothing was written then.
    """
    if isinstance(state, Mapping):
        columns = _given(state, weights, specs)
    else:
        places = {name: _place(state, weights, name) for name in specs}
        for place in places.values():
            if place is not None and place.exists():
                raise FileExistsError(f"{place} exists; {FRESH}")
        if isinstance(state, str | os.PathLike) and state != LIKE_WEIGHTS:
            Path(state).mkdir(parents=True, exist_ok=True)
        columns = {name: _make(state, weights, name, spec, places[name]) for name, spec in specs.items()}
    for name, spec in specs.items():
        if fill and (spec.initial or isinstance(state, Mapping)):
            columns[name].init_(torch.nn.init.constant_, spec.initial)
    return columns


def _make(state: Any, weights: Store, name: str, spec: ColumnSpec, place: Path | None) -> Store:
    shape = (len(weights), *spec.row_shape)
    if place is not None:
        return create_store(place, shape, spec.dtype)
    label = f"{name} of {weights.name}"
    if isinstance(weights, DeviceStore):
        return DeviceStore(torch.zeros(shape, dtype=spec.dtype, device=weights.device), name=label)
    if state == LIKE_WEIGHTS and isinstance(weights, ArrayStore):
        return ArrayStore(torch.zeros(shape, dtype=spec.dtype), name=label)
    return PinnedStore.zeros(shape, spec.dtype, name=label)


def _place(state: Any, weights: Store, name: str) -> Path | None:
    """The file of a column; None for memory."""
    if state is None:
        return None
    if state != LIKE_WEIGHTS:
        return Path(state) / f"{name}.npy"
    if isinstance(weights, MemmapStore | ZarrStore):
        path = Path(weights.name)
        if not path.exists():
            raise ValueError(f"state={LIKE_WEIGHTS!r} has no file name to go by in {weights.name}; pass a folder instead")
        suffix = ".npy" if isinstance(weights, MemmapStore) else ".zarr"
        return path.with_name(f"{path.stem}.{name}{suffix}")
    return None


def _given(state: Mapping[str, Any], weights: Store, specs: Mapping[str, ColumnSpec]) -> dict[str, Store]:
    if set(state) != set(specs):
        raise ValueError(f"state has the columns {sorted(state)}; the optimizer keeps {sorted(specs)}: pass a store for each")
    columns = {}
    for name, spec in specs.items():
        store = columns[name] = open_writable(state[name])
        wanted = (len(weights), *spec.row_shape)
        if store.shape != wanted or store.dtype != spec.dtype:
            raise ValueError(f"state[{name!r}] is {store.shape} {store.dtype}; the optimizer keeps it as {wanted} {spec.dtype}")
        if not store.writable:
            raise PermissionError(f"state[{name!r}], {store.name}, is read-only; open it with mode='r+'")
    return columns
