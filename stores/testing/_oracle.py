"""A store that is right at a glance, to compare others with."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from rowferry.stores import Store


@final
class OracleStore(Store):
    """A copy of ``values`` in memory, read and written row by row in a Python loop; slow, and nothing to get wrong.

    ``memory`` is None, so whoever reads it goes through ``gather`` as for a file.

    Attributes:
        values: all rows as they are now.
    """

    def __init__(self, values: torch.Tensor, *, writable: bool = True, name: str = "oracle") -> None:
        self.values = values.detach().cpu().clone()
        self.shape = tuple(values.shape)
        self.dtype = values.dtype
        self.writable = writable
        self.name = name

    @property
    def identity(self) -> Hashable:
        return ("oracle", id(self))

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        for place, row in enumerate(rows.tolist()):
            out[place] = self.values[row]

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        for place, row in enumerate(rows.tolist()):
            self.values[row] = values[place]

    def _flush(self, sync: bool) -> None:
        del sync

    def _close(self) -> None:
        pass  # values stay, to be compared with
