"""How rows of each kind of store will cross to a device: the pipeline's own choice, asked with tiny stores."""

from __future__ import annotations

import numpy as np
import torch

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore, PinnedStore, Store


def movers(device: torch.device, kernels_problem: str | None) -> dict[str, dict[str, str]]:
    """How rows of each kind of store will cross to ``device``, and why: what the pipeline itself chooses.

    Tiny stores in memory stand for each kind; nothing is written to disk and no row is moved.
    """
    rows = np.zeros((8, 4), np.float32)
    kinds: dict[str, Store] = {
        "PinnedStore": PinnedStore.from_array(rows),
        "ArrayStore": ArrayStore(rows),
        "ZarrStore": ArrayStore(rows.astype(">f4")),  # as in zarr, rows can't be used where they lie
    }
    chosen = {}
    for kind, store in kinds.items():
        with store, Pipeline(store, batch_size=1, device=device, staging_bytes=1 << 20) as pipe:
            stats = pipe.stats()
        chosen[kind] = {"mover": str(stats.mover), "why": str(stats.mover_why)}
    chosen["MemmapStore"] = dict(chosen["ArrayStore"])
    if device.type == "cuda" and not kernels_problem:
        chosen["MemmapStore"]["why"] += (
            "; a kernel reads a file opened with mode='r' where it lies, once it is in the page cache"
        )
    return chosen
