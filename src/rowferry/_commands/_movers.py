"""How rows of each kind of store will cross to a device: the pipeline's own choice, asked with tiny stores."""

from __future__ import annotations

import numpy as np
import torch

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore, PinnedStore, Store

_WHY = {
    "local": "nothing has to cross",
    "copy": "host threads gather rows ahead of use, the copy engine carries them",
    "zero-copy": "a kernel reads pinned rows over the link, no host thread touches them",
    "hybrid": "a kernel reads a share of the rows over the link, host threads and the copy engine bring the rest",
}
_ON_CPU = "host threads gather rows ahead of use"


def movers(device: torch.device, kernels_problem: str | None) -> dict[str, dict[str, str]]:
    """How rows of each kind of store will cross to ``device``, and why: what the pipeline itself chooses.

    Tiny stores in memory stand for each kind; nothing is written to disk and no row is moved.
    """
    rows = np.zeros((8, 4), np.float32)
    kinds: dict[str, Store] = {
        "PinnedStore": PinnedStore.from_array(rows),
        "ArrayStore, MemmapStore": ArrayStore(rows),
        "ZarrStore": ArrayStore(rows.astype(">f4")),  # as in zarr, rows can't be used where they lie
    }
    chosen = {}
    for kind, store in kinds.items():
        with store, Pipeline(store, batch_size=1, device=device, staging_bytes=1 << 20) as pipe:
            mover = str(pipe.stats().mover)
        why = _ON_CPU if mover == "copy" and device.type == "cpu" else _WHY[mover]
        if kind == "PinnedStore" and mover == "copy" and kernels_problem:
            why += f"; no kernel, since {kernels_problem}"
        chosen[kind] = {"mover": mover, "why": why}
    return chosen
