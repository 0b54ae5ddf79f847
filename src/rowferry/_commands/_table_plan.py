"""What a table is, from the words of the command line: its dtype, its optimizer, the state that this really keeps."""

from __future__ import annotations

import inspect
import json
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from rowferry.pipeline import RowTable
from rowferry.stores import ArrayStore

from ._stores import dtype_name, dtype_named

NO_OPTIMIZER = "none"
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Wanted(NamedTuple):
    """The table of the command line. ``columns``: bytes a row of each column of the optimizer's state."""

    rows: int
    dim: int
    dtype: torch.dtype
    optimizer: type[Optimizer] | None
    settings: dict[str, Any]
    columns: dict[str, int]
    path: str

    @property
    def weight_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


def wanted(rows: int, dim: int, dtype: str, optimizer: str, arguments: list[str], path: str) -> Wanted:
    """Words to a table; its state is what a real optimizer keeps.

    Raises:
        ValueError, TypeError: a name that torch does not know, or an optimizer that can't train a RowTable.
    """
    stored = dtype_named(_SHORT.get(dtype, dtype))
    assert stored is not None
    kind, settings = optimizer_named(optimizer), settings_named(arguments)
    columns = state_columns(kind, settings, dim, stored) if kind else {}
    return Wanted(rows, dim, stored, kind, settings, columns, path)


def optimizer_named(name: str) -> type[Optimizer] | None:
    """The optimizer of ``torch.optim`` of that name, in any case; None for ``none``.

    Raises:
        ValueError: torch has none of that name.
    """
    known: dict[str, type[Optimizer]] = {each.lower(): kind for each, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    if name.lower() == NO_OPTIMIZER:
        return None
    if name.lower() not in known:
        raise ValueError(f"optimizer {name!r} is not one of torch.optim's; use one of {', '.join(known)}, or {NO_OPTIMIZER}")
    return known[name.lower()]


def settings_named(words: list[str]) -> dict[str, Any]:
    """``["momentum=0.9", "fused=true"]`` as keywords, values read as JSON.

    Raises:
        ValueError: a word without ``=``, or a value that is not JSON.
    """
    settings = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            settings[name] = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"--optimizer-arg {word!r} is not NAME=VALUE with a value such as 0.9, true or [0.9, 0.99]"
            ) from error
    return settings


def state_columns(kind: type[Optimizer], settings: dict[str, Any], dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes a row of each column of state that ``kind`` keeps for rows of ``dim`` values: those of a table of one row.

    Raises:
        TypeError: an optimizer that can't train a RowTable, or settings that it does not take.
    """
    table = RowTable(
        ArrayStore(torch.zeros((1, dim), dtype=dtype)),
        optimizer=kind,
        optimizer_args=settings,
        state="like weights",
        device="cpu",
    )
    iter(table.batches([[0]], lookahead=0))  # training begins, and so the columns are made
    return {name: store.row_nbytes for name, store in table.state.items()}


def constructor(placement: str, table: Wanted, batch: int) -> str:
    """The call that makes the table, or a pipeline that reads it, to be typed after ``import torch, rowferry as rf``."""
    path = table.path
    if table.optimizer is None:
        source = {
            "gpu": f'rf.DeviceStore(rf.open_store("{path}").gather(slice(None)).to("cuda"))',
            "pinned": f'rf.PinnedStore.load("{path}")',
            "memmap": f'"{path}"',
        }[placement]
        return f"rf.Pipeline({source}, batch_size={batch}, shuffle=True)"
    shape, kind = f"({table.rows}, {table.dim})", f"torch.{dtype_name(table.dtype)}"
    store = {
        "gpu": f'rf.DeviceStore(torch.zeros({shape}, dtype={kind}, device="cuda"))',
        "pinned": f"rf.PinnedStore.zeros({shape}, {kind})",
        "memmap": f'rf.create_store("{path}", {shape}, {kind})',
    }[placement]
    more = f", optimizer_args={table.settings!r}" if table.settings else ""
    more += ', state="like weights"' if placement == "memmap" else ""
    return f"rf.RowTable({store}, optimizer=torch.optim.{table.optimizer.__name__}{more})"


def _is_optimizer(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
