"""Rows of a .npy file, mapped into memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._contract import Store
from ._files import Mode, lock_writer, reserve, unlock_writer
from ._npy import MOST_HEADER_BYTES, NpyHeader, header_bytes, parse_header
from ._page_cache import PageCache
from ._rows import as_slice
from ._views import HostRows

_log = logging.getLogger("rowferry")
_MAP_NORESERVE = 0x4000  # of mman.h on Linux; Python 3.11 does not name it
_LONG = 64 << 10  # bytes; a row or a run of rows of that length gains from the kernel's read-ahead, short ones drown in it


@final
class MemmapStore(Store):
    """Rows of a .npy file of any header version, order (C, Fortran) and byte order, mapped and never read whole.

    Opening changes no byte of the file. ``memory`` is None for Fortran order and foreign byte order: rows are then
    copied a request at a time, in native byte order, and written in the file's own.

    ``"r"``: the file cannot be changed through the store. Its ``memory`` is copy-on-write: writing to it is neither
    seen in the file nor a crash, only wrong, since the store reads it back (where the system has no room for such a
    mapping it is a read-only one, writing to which crashes; that is logged). ``"r+"``: one store at a time, in any
    process, has the file (``BlockingIOError`` names the process), until ``close`` or its death; the disk space of a
    sparse file is reserved (``OSError`` when there is too little), so that no later write can fail for it.

    A file opened with ``"r"`` that is mostly in the page cache, and fits there, can be page-locked without a copy; see
    ``page_cache``. Views of it keep it locked; the store itself never locks it.

    ``flush()`` has nothing to do, for a mapped file survives its process; ``flush(sync=True)`` is fsync.

    Attributes:
        header: what the file's first bytes say; see ``NpyHeader``.

    Args:
        path: the file.
        mode: ``"r"``, or ``"r+"`` to write.
        dtype: for elements that NumPy has no type for: what raw bytes or integers of its size are, such as
            ``torch.bfloat16``. No cast.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` does. TypeError: elements that no torch dtype has (objects,
            structures, strings, long doubles). ValueError: no .npy file, rank 0, or shorter than its header says.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode = "r", *, dtype: torch.dtype | None = None) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"mode is {mode!r}; it must be 'r' (read) or 'r+' (read and write)")
        file = Path(path)
        self.name = str(path)
        self.writable = mode == "r+"
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{path} is not a file")
        self._fd = os.open(file, (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC)
        # Also for a store that is dropped without close(): it must not stay locked for this process's life.
        self._release = weakref.finalize(self, _release, self._fd, os.getpid() if self.writable else None)
        try:
            self._open(file, dtype)
        except BaseException:
            self._release()
            raise

    def _open(self, file: Path, dtype: torch.dtype | None) -> None:
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
        self._rows: HostRows | None = HostRows(self._array(header), header.dtype)
        self.memory = self._rows.memory
        if self.memory is not None and header.nbytes and not self.writable:
            self.page_cache = PageCache(self._fd, header, self.name)

    def _array(self, header: NpyHeader) -> NDArray[Any]:
        order: Literal["C", "F"] = "F" if header.fortran else "C"
        if not header.nbytes:
            return np.empty(header.shape, header.stored, order)
        mapped = self._map(header.offset + header.nbytes)
        if order == "C" and self.row_nbytes < _LONG:
            mapped.madvise(mmap.MADV_RANDOM)  # else each row that is not in memory reads 32 pages around it
        flat = np.frombuffer(mapped, header.stored, header.nbytes // header.stored.itemsize, header.offset)
        return flat.reshape(header.shape, order=order)

    def _map(self, nbytes: int) -> mmap.mmap:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if self.writable:
            return mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED, both)
        try:
            return mmap.mmap(self._fd, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, both)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
        _log.info("%s: no room for a copy-on-write mapping; it is mapped read-only", self.name)
        return mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)

    @property
    def identity(self) -> Hashable:
        return self._identity

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        held, span = self._held(), as_slice(rows)
        if span is None or self.header.fortran or out.nbytes < _LONG:
            held.gather(rows, out)
            return
        # A mapping for random rows is read page by page; a long run of rows is read from the file itself.
        data = out.view(-1).view(torch.uint8).numpy()
        self._read(data, self.header.offset + span.start * self.row_nbytes)
        stored = self.header.stored
        if not stored.isnative:
            np.copyto(data.view(stored.newbyteorder("=")), data.view(stored))

    def _read(self, data: NDArray[np.uint8], offset: int) -> None:
        view = data.data
        while view:
            done = os.preadv(self._fd, [view], offset)
            if not done:
                raise OSError(errno.EIO, f"{self.name} was cut off at byte {offset:,} since it was opened")
            view, offset = view[done:], offset + done

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._held().scatter(rows, values)

    def _flush(self, sync: bool) -> None:
        if sync and self.writable:
            os.fsync(self._fd)

    def _close(self) -> None:
        self.memory, self._rows, self.page_cache = None, None, None
        self._release()

    def _held(self) -> HostRows:
        rows = self._rows  # read once: another thread may close the store
        if rows is None:
            raise ValueError(f"{self.name} is closed; open it again")
        return rows


def write_npy(path: Path, shape: tuple[int, ...], dtype: torch.dtype, fill: torch.Tensor, name: Path) -> None:
    """A new file of rows that all hold ``fill`` (0-d, of ``dtype``), durable on return. Errors call it ``name``.

    Raises:
        TypeError: .npy cannot hold ``dtype``. OSError: the disk is too full. The caller removes what was written.
    """
    head = header_bytes(shape, dtype)
    count = int(np.prod(shape, dtype=object))
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
