"""Rows of a zarr array by zarr-python's own indexing: what its users write, and so what peers begin with."""

from __future__ import annotations

import numpy as np
import torch
import zarr

from rowferry.stores import ZarrStore

from .reading import Oracle
from .workloads import Index


def zarr_rows(path: str, array: str | None, store: ZarrStore) -> Oracle:
    """``index -> rows`` of the array that ``store`` reads, as a CPU tensor of the store's dtype."""
    opened = zarr.open(path, mode="r")
    source = opened if isinstance(opened, zarr.Array) else opened[array] if array else next(iter(opened.arrays()))[1]
    assert isinstance(source, zarr.Array)

    def rows(index: Index) -> torch.Tensor:
        found = np.ascontiguousarray(source.oindex[(index,)])
        native = found.astype(found.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(native).view(store.dtype)

    return rows
