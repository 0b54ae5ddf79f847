"""Of several values for one row the last, found on a GPU without sorting: places claim rows, and the highest place wins.

A sort is some ten launches, and a call on demand costs what its launches cost the host; this is three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ._kernel_arguments import blocks_over
from ._kernel_sources import EACH, INDEX_TYPES
from ._kernels import INDEX_NAMES, kernels

ROWS_A_CLAIM = 256  # rows of the table for each one written: four bytes a row are cleared for a call
MOST_PLACES = (1 << 31) - 2  # a claim is int32, and 0 is none

CUDA_SOURCE = (
    EACH
    + r"""#define KERNEL extern "C" __global__ void __launch_bounds__(512)
#define LAST(INDEX, TYPE)                                                                                                  \
    KERNEL claim_##INDEX(const TYPE* rows, int* claims, long long n) {                                                     \
        EACH(i, n) atomicMax(&claims[rows[i]], (int)(i + 1));                                                              \
    }                                                                                                                      \
    KERNEL winners_##INDEX(const TYPE* rows, const int* claims, unsigned char* marks, long long n) {                       \
        EACH(i, n) marks[i] = claims[rows[i]] == (int)(i + 1);                                                             \
    }
LAST(int32, int)
LAST(int64, long long)
"""
)

FUNCTIONS = {f"{name}_{index}": (0,) * count for name, count in (("claim", 3), ("winners", 4)) for index in INDEX_TYPES}
"""Names, and arguments with which a launch does nothing."""


def pays(places: int, table_rows: int) -> bool:
    """Whether so many places had better claim their rows than be sorted, in a table of so many rows."""
    return table_rows <= ROWS_A_CLAIM * places and places <= MOST_PLACES


def last_of_each_row(rows: Tensor, table_rows: int) -> Tensor:
    """uint8 ``(k,)``: 1 where no later place has the same row. On the current stream, no sync.

    Args:
        rows: ``(k,)`` int32 or int64 on a GPU, contiguous, in ``[0, table_rows)``; not checked. For 4 * ``table_rows`` bytes
            there is memory for a moment.

    Raises:
        ImportError: CuPy is missing or does not work; the message names the extra.
    """
    launch = _kernels(rows.device.index)
    index = INDEX_NAMES[rows.dtype]
    claims = torch.zeros(table_rows, dtype=torch.int32, device=rows.device)
    marks = torch.empty(rows.shape[0], dtype=torch.uint8, device=rows.device)
    count = rows.shape[0]
    blocks = blocks_over(count)
    launch[f"claim_{index}"](blocks, rows.data_ptr(), claims.data_ptr(), count)
    launch[f"winners_{index}"](blocks, rows.data_ptr(), claims.data_ptr(), marks.data_ptr(), count)
    return marks


@functools.cache
def _kernels(device: int) -> dict[str, Callable[..., None]]:
    return kernels(torch.device("cuda", device), CUDA_SOURCE, FUNCTIONS)
