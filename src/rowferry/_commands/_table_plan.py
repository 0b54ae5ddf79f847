"""What a table is, from the words of the command line: its dtype, its optimizer, the state that this really keeps."""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch.optim import Optimizer

from rowferry.pipeline import RowTable
from rowferry.stores import ArrayStore

from ._stores import dtype_name

NO_OPTIMIZER = "none"
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def long_dtype(name: str) -> str:
    """``float32`` for ``fp32``; other names as they are."""
    return _SHORT.get(name, name)


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


def constructor(
    placement: str,
    *,
    rows: int,
    dim: int,
    dtype: torch.dtype,
    optimizer: type[Optimizer] | None,
    settings: dict[str, Any],
    batch: int,
    path: str,
    device: str,
) -> str:
    """The call that makes the table, or a pipeline that reads it, to be typed after ``import torch, rowferry as rf``."""
    if optimizer is None:
        source = {
            "gpu": f'rf.DeviceStore(rf.open_store("{path}").gather(slice(None)).to("{device}"))',
            "pinned": f'rf.PinnedStore.load("{path}")',
            "memmap": f'"{path}"',
        }[placement]
        return f"rf.Pipeline({source}, batch_size={batch}, shuffle=True)"
    shape, kind = f"({rows}, {dim})", f"torch.{dtype_name(dtype)}"
    store = {
        "gpu": f'rf.DeviceStore(torch.zeros({shape}, dtype={kind}, device="{device}"))',
        "pinned": f"rf.PinnedStore.zeros({shape}, {kind})",
        "memmap": f'rf.create_store("{path}", {shape}, {kind})',
    }[placement]
    more = f", optimizer_args={settings!r}" if settings else ""
    more += ', state="like weights"' if placement == "memmap" else ""
    return f"rf.RowTable({store}, optimizer=torch.optim.{optimizer.__name__}{more})"


def _is_optimizer(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
