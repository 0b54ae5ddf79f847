"""Rows of an open file in any layout: mapped, and read from the file where the mapping would be slow."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._commit import Durable
from ._file_reads import Cache, FileReads
from ._file_writes import Durability, FileWrites
from ._views import HostRows

_log = logging.getLogger("rowferry")
_MAP_NORESERVE = 0x4000  # of mman.h on Linux; Python 3.11 does not name it
_SMALL = 64 << 20  # bytes of a file that is brought in at once when somebody asks whether it is in memory


@final
class MappedRows:
    """What a store over one file holds while it is open. ``fd`` stays the caller's, and open.

    Args:
        fd: a file of at least ``offset`` and the rows' bytes; open to write where ``writable``.
        shape: ``(rows, *row_shape)``.
        dtype: torch dtype of the elements; ``stored`` is how they lie in the file, of the same size.
        offset: where the first row begins.
        fortran: the first dimension varies fastest; rows are then not whole after a kill, and "atomic" is not possible.
        writable: the file's path, where it is open to write, locked and recovered.
        durability: what a crash leaves of it.
        name: what errors call the file.

    Attributes:
        memory: all rows as a tensor over the mapping; None for Fortran order and foreign byte order.
    """

    def __init__(
        self,
        fd: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stored: np.dtype[Any],
        *,
        offset: int,
        fortran: bool = False,
        writable: Path | None = None,
        durability: Durability = "flush",
        cache: Cache = "keep",
        name: str,
    ) -> None:
        self._fd, self._stored = fd, stored
        self._reads: FileReads | None = None
        self._writes: FileWrites | None = None
        order: Literal["C", "F"] = "F" if fortran else "C"
        nbytes = math.prod(shape) * stored.itemsize
        self._nbytes = nbytes
        if not nbytes:
            array: NDArray[Any] = np.empty(shape, stored, order)
        else:
            mapped = _map(fd, offset + nbytes, writable is not None, name)
            if not fortran:
                mapped.madvise(mmap.MADV_RANDOM)  # else each row that is not in memory reads 32 pages around it
                place, size = {"offset": offset, "row_nbytes": nbytes // shape[0]}, shape[0]
                self._reads = FileReads(fd, mapped=mapped, cache=cache, name=name, **place)
                if writable is not None:
                    self._writes = FileWrites(writable, fd, mapped, self._reads, rows=size, durability=durability, **place)
            array = np.frombuffer(mapped, stored, nbytes // stored.itemsize, offset).reshape(shape, order=order)
        self._held = HostRows(array, dtype)
        self.memory = self._held.memory

    @property
    def from_disk(self) -> bool:
        """As ``Store.from_disk``."""
        return self._reads is not None and self._reads.from_disk

    def expect(self, rows: NDArray[np.int64]) -> None:
        """As ``Store.expect``."""
        if self._reads is not None:
            self._reads.expect(rows)

    def resident(self) -> bool:
        """As ``Store.resident``; a file of up to 64 MiB is read in first."""
        reads = self._reads
        if reads is None or reads.in_memory or reads.resident():
            return True
        if self._nbytes > _SMALL:
            return False
        reads.read_through()
        return True

    def gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        """As ``Store._gather``."""
        held, reads, stored = self._held, self._reads, self._stored
        if reads is None or not out.nbytes:
            held.gather(rows, out)
            return
        data = out.view(-1).view(torch.uint8).numpy()
        copied = reads.gather(rows, data, lambda: held.gather(rows, out))
        if not copied and not stored.isnative:
            np.copyto(data.view(stored.newbyteorder("=")), data.view(stored))

    def scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        """As ``Store._scatter``."""
        writes, stored = self._writes, self._stored
        if writes is None or not values.nbytes:
            self._held.scatter(rows, values)
            return
        data = values.view(-1).view(torch.uint8).numpy()
        if not stored.isnative:
            data = data.view(stored.newbyteorder("=")).astype(stored).view(np.uint8)
        writes.scatter(rows, data)

    @property
    def durable(self) -> Durable | None:
        """The file's part in commits; None but for ``durability="atomic"``."""
        return None if self._writes is None else self._writes.durable

    def flush(self, sync: bool) -> None:
        """As ``Store.flush``, for an open file that is written."""
        if self._writes is not None:
            self._writes.flush(sync)
        elif sync:
            os.fsync(self._fd)

    def flush_to_close(self) -> None:
        """As ``flush``, before the file is closed; see ``Durable.flush_to_close``."""
        if self._writes is not None:
            self._writes.flush_to_close()

    def close(self) -> None:
        """Give up what is beside the file. Before the file is closed."""
        if self._writes is not None:
            self._writes.close()


def _map(fd: int, nbytes: int, writable: bool, name: str) -> mmap.mmap:
    both = mmap.PROT_READ | mmap.PROT_WRITE
    if writable:
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, both)
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, both)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    _log.info("%s: no room for a copy-on-write mapping; it is mapped read-only", name)
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
