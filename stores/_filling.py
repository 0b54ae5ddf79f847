"""``Store.init_``: rows drawn piece by piece, the same ones for every kind of store."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ._contract import Store
from ._rows import pieces


def init(store: Store, limit: int, initialize: Callable[[torch.Tensor], object], seed: int | None) -> None:
    """Fill all rows of a writable store, at most ``limit`` bytes at a time. See ``Store.init_``."""
    for start, stop in pieces(len(store), store.row_nbytes, limit):  # not by chunk: every store draws the same rows
        piece = torch.empty((stop - start, *store.row_shape), dtype=store.dtype)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed + start)
            with torch.no_grad():
                initialize(piece)
        store._scatter(np.arange(start, stop), piece.to(store.device))
