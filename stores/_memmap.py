"""Rows of a .npy file, mapped into memory."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from ._contract import Store
from ._file_reads import Cache, check_cache
from ._files import Mode, lock_writer, reserve, unlock_writer
from ._mapped_rows import MappedRows
from ._npy import MOST_HEADER_BYTES, header_bytes, parse_header

_ALIGNED = 1 << 20  # bytes of rows from which on a new file's rows begin at a page


@final
class MemmapStore(Store):
    """Rows of a .npy file of any header version, order (C, Fortran) and byte order, mapped and never read whole.

    Opening changes no byte of the file. ``memory`` is None for Fortran order and foreign byte order: rows are then
    copied a request at a time, in native byte order, and written in the file's own.

    Rows in C order are read from the file, hundreds of requests in flight, until all of the file is in memory; then they
    are copied from the mapping. The process's resident size does not grow with the file. In Fortran order a row lies in
    as many places as it has elements: rows are always copied from the mapping, which the disk fills page by page.

    ``"r"``: the file cannot be changed through the store. Its ``memory`` is copy-on-write: writing to it is neither
    seen in the file nor a crash, only wrong, since the store may read it back (where the system has no room for such a
    mapping it is a read-only one, writing to which crashes; that is logged). ``"r+"``: one store at a time, in any
    process, has the file (``BlockingIOError`` names the process), until ``close`` or its death; the disk space of a
    sparse file is reserved (``OSError`` when there is too little), so that no later write can fail for it.

    ``flush()`` has nothing to do, for a mapped file survives its process; ``flush(sync=True)`` is fsync.

    Attributes:
        header: what the file's first bytes say; see ``NpyHeader``.

    Args:
        path: the file.
        mode: ``"r"``, or ``"r+"`` to write.
        dtype: for elements that NumPy has no type for: what raw bytes or integers of its size are, such as
            ``torch.bfloat16``. No cast.
        cache: what becomes of the page cache behind rows that came from the disk. "keep" leaves their pages there, for
            the next epoch and other processes; "drop" gives them up again, so that a set far larger than memory does
            not drive out what others need, and never maps the file whole.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` does. TypeError: elements that no torch dtype has (objects,
            structures, strings, long doubles). ValueError: no .npy file, rank 0, or shorter than its header says.
    """

    def __init__(
        self, path: str | os.PathLike[str], mode: Mode = "r", *, dtype: torch.dtype | None = None, cache: Cache = "keep"
    ) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"mode is {mode!r}; it must be 'r' (read) or 'r+' (read and write)")
        check_cache(cache)
        file = Path(path)
        self.name = str(path)
        self.writable = mode == "r+"
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{path} is not a file")
        self._fd = os.open(file, (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC)
        # Also for a store that is dropped without close(): it must not stay locked for this process's life.
        self._release = weakref.finalize(self, _release, self._fd, os.getpid() if self.writable else None)
        try:
            self._open(file, dtype, cache)
        except BaseException:
            self._release()
            raise

    def _open(self, file: Path, dtype: torch.dtype | None, cache: Cache) -> None:
        if self.writable:
            lock_writer(self._fd, file)
        header = parse_header(os.pread(self._fd, MOST_HEADER_BYTES, 0), dtype, self.name)
        self.shape, self.dtype = header.shape, header.dtype
        self.header = header
        seen = os.fstat(self._fd)
        self._identity = ("file", seen.st_dev, seen.st_ino)
        needed = header.offset + header.nbytes
        if seen.st_size < needed:
            raise ValueError(
                f"{self.name} is cut off: it has {seen.st_size:,} bytes, and its header says {needed:,} "
                f"(shape {header.shape} of {header.stored}); it was not written to the end, or not copied whole"
            )
        if self.writable:
            reserve(self._fd, needed, file)
        self._rows: MappedRows | None = MappedRows(
            self._fd,
            header.shape,
            header.dtype,
            header.stored,
            offset=header.offset,
            fortran=header.fortran,
            writable=self.writable,
            cache=cache,
            name=self.name,
        )
        self.memory = self._rows.memory

    @property
    def identity(self) -> Hashable:
        return self._identity

    def resident(self) -> bool:
        """As ``Store.resident``; a file of up to 64 MiB is read in first."""
        return self._held().resident()

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._held().gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._held().scatter(rows, values)

    def _flush(self, sync: bool) -> None:
        if sync and self.writable:
            os.fsync(self._fd)

    def _close(self) -> None:
        self.memory, self._rows = None, None
        self._release()

    def _held(self) -> MappedRows:
        rows = self._rows  # read once: another thread may close the store
        if rows is None:
            raise ValueError(f"{self.name} is closed; open it again")
        return rows


def write_npy(path: Path, shape: tuple[int, ...], dtype: torch.dtype, fill: torch.Tensor, name: Path) -> None:
    """A new file of rows that all hold ``fill`` (0-d, of ``dtype``), durable on return. Errors call it ``name``.

    Raises:
        TypeError: .npy cannot hold ``dtype``. OSError: the disk is too full. The caller removes what was written.
    """
    count = int(np.prod(shape, dtype=object))
    # In a large file rows begin at a page, so that a row of 1 KiB lies in one page and not, now and then, in two.
    head = header_bytes(shape, dtype, align=mmap.PAGESIZE if count * dtype.itemsize >= _ALIGNED else 64)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        reserve(fd, len(head) + count * dtype.itemsize, name)
        os.pwrite(fd, head, 0)
        if bool(fill.reshape(1).view(torch.uint8).any()):  # reserved bytes are zeros already; -0.0 is none
            piece = fill.expand(min(count, (1 << 24) // dtype.itemsize)).contiguous().view(torch.uint8).numpy()
            for start in range(0, count * dtype.itemsize, piece.size):
                _write_all(fd, piece[: count * dtype.itemsize - start], len(head) + start)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    view = data.data
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _release(fd: int, writer: int | None) -> None:
    """Close the file. The lock goes first, for views may keep the mapping, and it the lock; a forked child has neither."""
    if writer == os.getpid():
        unlock_writer(fd)
    os.close(fd)
