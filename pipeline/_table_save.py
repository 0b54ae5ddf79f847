"""A table as a folder: a ``.npy`` or ``.zarr`` a column, and one JSON file. Nothing in it is executed when it is loaded.

A folder appears whole or not at all: it is written under a temporary name beside its place, then renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from rowferry.stores import PinnedStore, Store, create_store, open_store
from rowferry.stores._files import beside, replace, sync_folder

from ._table_core import Core, Rounding
from ._table_probe import ColumnSpec, constructor_settings
from ._table_state import make_state, open_writable

JSON = "table.json"
VERSION = 1
Kind = Literal["npy", "zarr"]


@final
@dataclass(frozen=True)
class Saved:
    """What the JSON file says.

    Attributes:
        columns: file name and dtype of each, ``weight`` among them.
        scalars: the table's own state, such as Adam's ``step``; None before the first step.
        optimizer: a name in ``torch.optim``, or None for another one; ``settings`` are its constructor's.
        served: batches trained so far.
    """

    version: int
    columns: dict[str, list[str]]
    scalars: dict[str, float] | None
    optimizer: str | None
    settings: dict[str, Any]
    padding: int | None
    dtype: str
    rounding: Rounding
    seed: int
    served: int


def save(core: Core, path: str | os.PathLike[str], kind: Kind) -> None:
    """See ``RowTable.save``."""
    if kind not in ("npy", "zarr"):
        raise ValueError(f"kind is {kind!r}; columns are saved as 'npy' or 'zarr'")
    target = Path(path)
    if os.path.lexists(target):
        _refuse_to_replace(target)
    core.flush(False)
    stores = core.stores()
    said = Saved(
        version=VERSION,
        columns={name: [f"{name}.{kind}", _dtype_name(store.dtype)] for name, store in stores.items()},
        scalars=core.numbers(),
        optimizer=_name_of(core.binding.optimizer),
        settings=_plain(constructor_settings(type(core.binding.optimizer), core.binding.group)),
        padding=core.padding,
        dtype=_dtype_name(core.dtype),
        rounding=core.rounding,
        seed=core.seed,
        served=core.served,
    )
    with beside(target) as temporary:
        temporary.mkdir()
        for name, store in stores.items():
            store.save(temporary / said.columns[name][0])
        with open(temporary / JSON, "x", encoding="utf-8") as file:
            json.dump(asdict(said), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        replace(temporary, target)


def read(path: str | os.PathLike[str]) -> Saved:
    """The JSON file of a saved table.

    Raises:
        FileNotFoundError: no table is there. ValueError: of another version, or not written by ``save``.
    """
    file = Path(path) / JSON
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no saved table: it has no {JSON}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        version = found["version"]
        if version != VERSION:
            raise ValueError(f"it is of version {version}, and this rowferry reads version {VERSION}")
        saved = Saved(**found)
        for name, (column, dtype) in saved.columns.items():
            if Path(column).name != column or name == "":
                raise ValueError(f"column {name!r} is said to be in {column!r}, which is no file of this folder")
            dtype_of(dtype)
        if "weight" not in saved.columns:
            raise ValueError("it names no column 'weight'")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read as a saved table: {error}") from error
    return saved


def open_column(path: str | os.PathLike[str], saved: Saved, name: str) -> Store:
    """A column of a saved table, to read."""
    file, dtype = saved.columns[name]
    return open_store(Path(path) / file, dtype=dtype_of(dtype))


def room_for(path: str | os.PathLike[str], saved: Saved, store: Any) -> Store:
    """Where the weights of a saved table go: ``store=`` of ``RowTable.load``.

    Raises:
        ValueError: of another shape. PermissionError: read-only.
    """
    with open_column(path, saved, "weight") as column:
        if store is None:
            return PinnedStore.zeros(column.shape, column.dtype, name=f"weights of {path}")
        if isinstance(store, str | os.PathLike) and not os.path.lexists(store):
            return create_store(store, column.shape, column.dtype)
        found = open_writable(store)
        if found.shape != column.shape:
            raise ValueError(f"{found.name} is {found.shape}; the saved table is {column.shape}")
        if not found.writable:
            raise PermissionError(f"{found.name} is read-only; open it with mode='r+'")
        return found


def restore(core: Core, path: str | os.PathLike[str], saved: Saved, state: Any) -> None:
    """Weights, state and counters of a saved table, into a new one with the same settings. Streams in pieces."""
    names = [name for name in saved.columns if name != "weight"]
    opened = {name: open_column(path, saved, name) for name in saved.columns}
    try:
        specs = {name: ColumnSpec(opened[name].row_shape, opened[name].dtype, 0.0) for name in names}
        if names or saved.scalars is not None:
            core.columns = make_state(state, core.weights, specs, fill=False)
        for name, store in core.stores().items():
            store.copy_from(opened[name])
    finally:
        for column in opened.values():
            column.close()
    core.saved_scalars, core.served = saved.scalars, saved.served


def optimizer_class(saved: Saved) -> type[Optimizer]:
    """The class that the table was trained with, of ``torch.optim`` alone.

    Raises:
        ValueError: it was another one.
    """
    found = getattr(torch.optim, saved.optimizer, None) if saved.optimizer is not None else None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(
            f"the table's optimizer ({saved.optimizer or 'not of torch.optim, or with settings that JSON cannot hold'}) cannot "
            "be made from the file; pass optimizer="
        )
    return found


def settings_of(saved: Saved) -> dict[str, Any]:
    """The constructor's settings; pairs are tuples again."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.settings.items()}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called ``name``.

    Raises:
        ValueError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _refuse_to_replace(target: Path) -> None:
    """Raise unless ``target`` is a saved table that nobody writes to."""
    if not (target / JSON).is_file():
        raise FileExistsError(f"{target} exists and is no saved table; remove it, or choose another path")
    saved = read(target)
    for file, dtype in saved.columns.values():
        open_store(target / file, "r+", dtype=dtype_of(dtype)).close()  # BlockingIOError where a store is open for writing


def _name_of(optimizer: Optimizer) -> str | None:
    """Its name in ``torch.optim``; None when it is not from there, or its settings are not plain."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return None
    settings = constructor_settings(kind, optimizer.param_groups[0])
    return kind.__name__ if len(_plain(settings)) == len(settings) else None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that JSON can hold; a tensor of one number becomes that number."""
    plain = {}
    for name, value in settings.items():
        value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
        parts = value if isinstance(value, tuple | list) else (value,)
        if all(part is None or isinstance(part, bool | int | float | str) for part in parts):
            plain[name] = value
    return plain


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
