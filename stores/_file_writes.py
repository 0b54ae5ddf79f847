"""Rows written into a mapped file so that a kill leaves whole rows, or none of what no commit covers.

- ``"flush"``: rows pass through ``_redo``: after a kill each row is old or new.
- ``"atomic"``: their old values are made durable first, by ``_undo``: after a kill, of the process or the machine, all rows
  are those of the last commit.

No torch, as for ``_ring``.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from . import _redo
from ._commit import Durable
from ._commit_record import beside_file
from ._file_reads import FileReads
from ._records import as_records, scatter_records
from ._recovery import forget

Durability = Literal["flush", "atomic"]
"""What a crash leaves of a file that is being written: whole rows, or the last commit."""


@final
class FileWrites:
    """The way rows get into one file in C order. Threads as for ``Store.scatter``.

    Args:
        path: of the file, recovered already.
        fd: the file, open to write and locked; the caller's, and open for as long as this is used.
        offset, row_nbytes: where its rows lie.
        rows: how many.
        mapped: its mapping, shared and writable.
        reads: the way rows get out of it.

    Raises:
        OSError: no room for what is put beside it.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        mapped: mmap.mmap,
        reads: FileReads,
        *,
        offset: int,
        row_nbytes: int,
        rows: int,
        durability: Durability = "flush",
    ) -> None:
        self._fd, self._reads, self._row_nbytes = fd, reads, row_nbytes
        self._target = as_records(np.frombuffer(mapped, np.uint8, rows * row_nbytes, offset), row_nbytes)
        self._redo = _redo.Redo(beside_file(path, _redo.SUFFIX), fd, offset, row_nbytes)
        self.durable: Durable | None = None
        if durability == "atomic":
            self.durable = Durable(path, fd, rows, reads.read_raw, offset=offset, row_nbytes=row_nbytes)
        else:
            forget(path)

    def scatter(self, rows: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Write rows, which are distinct, as they are to lie in the file: ``len(rows) * row_nbytes`` bytes.

        Raises:
            OSError: the disk is full, or failed; rows of this call may be old or new, each of them whole.
        """
        self._reads.before_scatter(rows)
        source: NDArray[Any] = as_records(values, self._row_nbytes)
        if self.durable is not None:
            self.durable.protect(rows)
            scatter_records(self._target, rows, source)
        else:
            size = self._row_nbytes
            for start in range(0, len(rows), self._redo.capacity):
                piece = rows[start : start + self._redo.capacity]
                with self._redo.holding(piece, values[start * size : (start + len(piece)) * size]):
                    scatter_records(self._target, piece, source[start : start + len(piece)])
        self._reads.after_scatter(rows)

    def flush(self, sync: bool) -> None:
        """As ``Store.flush``; atomic files commit."""
        if self.durable is not None:
            self.durable.flush()
        elif sync:
            os.fsync(self._fd)

    def flush_to_close(self) -> None:
        """As ``Store.close`` wants it."""
        if self.durable is not None:
            self.durable.flush_to_close()

    def close(self) -> None:
        """Give up what is beside the file. Before ``fd`` is closed."""
        self._redo.close()
        if self.durable is not None:
            self.durable.close()


def check_durability(durability: Any) -> None:
    """Raise ValueError for what is no durability."""
    if durability not in ("flush", "atomic"):
        raise ValueError(
            f"durability is {durability!r}; it must be 'flush' (whole rows) or 'atomic' (rolled back to the last flush)"
        )
