"""A part of every row of another store, read only."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._contract import PIECE_BYTES, Store
from ._rows import pieces
from ._select import Selection
from ._views import HostRows


@final
class PartStore(Store):
    """``row[part]`` for each row of ``whole``, which it owns and closes.

    Where the rows are in memory or mapped it is a view, and nothing else of them is touched. Else whole rows are read, at
    most 64 MiB of them at a time.

    Threads: as for ``whole``.
    """

    def __init__(self, whole: Store, part: Selection) -> None:
        self._whole = whole
        self._part: Any = (slice(None), *part.key)
        self.name = whole.name
        self.shape = (len(whole), *part.shape)
        self.dtype = whole.dtype
        self.writable = False
        self.chunk_rows, self.block_rows = whole.chunk_rows, whole.block_rows
        memory = whole.memory
        self._rows: HostRows | None = HostRows(memory[self._part], whole.dtype) if memory is not None else None

    @property
    def identity(self) -> Hashable:
        return self._whole.identity

    def from_disk(self) -> bool:
        return self._rows is None and self._whole.from_disk()

    def expect(self, rows: NDArray[np.int64]) -> None:
        self._whole.expect(rows)

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        view = self._rows
        if view is not None:
            view.gather(rows, out)
            return
        for start, stop in pieces(rows.size, self._whole.row_nbytes, PIECE_BYTES):
            out[start:stop].copy_(self._whole.gather(rows[start:stop])[self._part])

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        raise AssertionError("a read-only store is refused before")

    def _flush(self, sync: bool) -> None:
        """Nothing is written."""

    def _close(self) -> None:
        self._rows = None
        self._whole.close()
