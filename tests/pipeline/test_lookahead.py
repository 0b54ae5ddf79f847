"""How many batches a window takes: as many as have distinct rows that fit the slot, up to ``lookahead``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rowferry.pipeline import Pipeline

SLOT = 64 << 10  # bytes


def largest_window(width: int, batches: Sequence[Any], **more: Any) -> int:
    """Batches of the largest window over rows of ``width`` float32."""
    table = torch.zeros(4_096, width)
    settings: dict[str, Any] = {"device": "cpu", "mover": "copy", "depth": 2, "staging_bytes": 2 * SLOT, **more}
    with Pipeline(table, batch_sampler=batches, **settings) as pipe:
        return max(pipe.stats().batches_in_window for _ in pipe)


def disjoint(size: int) -> list[Any]:
    return list(np.random.default_rng(0).permutation(4_096).reshape(-1, size))


def test_narrow_rows_get_more_batches_a_window_than_wide_ones() -> None:
    assert largest_window(128, disjoint(32)) == SLOT // (128 * 4 * 32)
    assert largest_window(32, disjoint(32)) == SLOT // (32 * 4 * 32)


def test_small_batches_get_more_of_them_a_window() -> None:
    assert largest_window(128, disjoint(16)) == 2 * largest_window(128, disjoint(32))


def test_distinct_rows_count_not_those_asked_for() -> None:
    repeating = [batch % 64 for batch in disjoint(32)]
    assert largest_window(128, repeating) > 4 * largest_window(128, disjoint(32))


def test_lookahead_is_the_most() -> None:
    assert largest_window(32, disjoint(32), lookahead=3) == 3
