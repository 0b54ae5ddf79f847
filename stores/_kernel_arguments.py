"""What kernels are launched with, worked out on the host: shapes, dtypes and places that row kernels take, how wide they may
move, and how many blocks others need."""

from __future__ import annotations

import torch
from torch import Tensor

from ._kernel_sources import THREADS

MOST_BLOCKS = 264  # two a multiprocessor of the largest cards, where a kernel has the card's memory for itself


def check_launch(
    device: torch.device, table: Tensor, values: Tensor, rows: Tensor, places: Tensor | None, marks: Tensor | None, blocks: int
) -> None:
    """Refuse what would make a kernel touch memory that is not its own. Shapes, dtypes and places; not row numbers.

    Raises:
        TypeError: a tensor that does not fit. ValueError: fewer than one block.
    """
    if blocks < 1:
        raise ValueError(f"blocks is {blocks}; a kernel needs at least one thread block")
    if table.dtype != values.dtype or table.shape[1:] != values.shape[1:]:
        raise TypeError(
            f"the table has rows {tuple(table.shape[1:])} of {table.dtype}, the values {tuple(values.shape[1:])} of "
            f"{values.dtype}; rows are moved by bytes and must be alike"
        )
    if not (table.is_contiguous() and values.is_contiguous()):
        raise TypeError("the table and the values must be contiguous; pass tensor.contiguous()")
    if values.device != device or (table.device != device and not (table.is_cpu and (table.is_pinned() or not table.nbytes))):
        raise TypeError(
            f"the values are on {values.device} and the table is on {table.device}; values must be on {device}, the table "
            "there or in page-locked host memory"
        )
    for name, tensor, allowed in (
        ("rows", rows, (torch.int32, torch.int64)),
        ("places", places, (torch.int64,)),
        ("marks", marks, (torch.uint8, torch.bool)),
    ):
        if tensor is None:
            continue
        fits = tensor.shape == rows.shape and tensor.dim() == 1 and tensor.is_contiguous()
        if not fits or tensor.dtype not in allowed or tensor.device != device:
            raise TypeError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; it must be contiguous, "
                f"({rows.numel()},), {' or '.join(map(str, allowed))}, on {device}"
            )
    if places is None and rows.shape[0] != values.shape[0]:
        raise TypeError(
            f"there are {rows.shape[0]} row numbers and {values.shape[0]} rows of values; without places they must be as many"
        )


def vector_bytes(*divided: int) -> int:
    """The widest vector (16, 8, 4, 2 or 1 bytes) that divides all addresses and sizes."""
    combined = 16
    for number in divided:
        combined |= number
    return combined & -combined


def blocks_over(count: int) -> int:
    """Thread blocks for a kernel that loops over ``count`` items (see ``EACH``): a thread an item, as far as that helps."""
    return min(-(-count // THREADS), MOST_BLOCKS)
