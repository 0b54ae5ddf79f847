"""Rows of a .npy file, mapped into memory."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._commit_state import decode_state
from ._contract import Store
from ._file_reads import Cache, check_cache
from ._file_writes import Durability, check_durability
from ._files import Mode, lock_writer, reserve, unlock_writer
from ._mapped_rows import MappedRows
from ._npy import MOST_HEADER_BYTES, header_bytes, parse_header
from ._page_cache import PageCache
from ._recovery import recover

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

    A file opened with ``"r"`` that is mostly in the page cache, and fits there, can be page-locked without a copy; see
    ``page_cache``. Views of it keep it locked; the store itself never locks it.

    What a crash leaves is ``durability``. "flush": after a kill of the process each row is old or new, and never half of both
    (in C order; rows pass through a small file beside, ``x.npy.redo``); ``flush()`` has nothing to do, for a mapped file
    survives its process, and ``flush(sync=True)`` is fsync. "atomic": after a kill of the process or the machine, rows are as
    of the last ``flush()`` that returned: the old value of each row is durable, in ``x.npy.undo``, before it is overwritten,
    and is put back by the next opening, by whichever process. Every ``flush`` is a commit and durable, and ``close`` is one.
    In a writable pipeline the stores commit together, with its state; see ``Pipeline.flush`` and ``committed_state``.

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
        durability: "flush" or "atomic"; with ``"r+"`` only. "atomic" needs C order, and writes each row about twice.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` does. TypeError: elements that no torch dtype has (objects,
            structures, strings, long doubles). ValueError: no .npy file, rank 0, or shorter than its header says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Mode = "r",
        *,
        dtype: torch.dtype | None = None,
        cache: Cache = "keep",
        durability: Durability = "flush",
    ) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"mode is {mode!r}; it must be 'r' (read) or 'r+' (read and write)")
        check_cache(cache)
        check_durability(durability)
        if durability == "atomic" and mode == "r":
            raise ValueError("durability='atomic' is of files that are written; open with mode='r+', or leave it out")
        file = Path(path)
        self.name = str(path)
        self.writable = mode == "r+"
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{path} is not a file")
        self._fd = os.open(file, (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC)
        # Also for a store that is dropped without close(): it must not stay locked for this process's life.
        self._opened: list[MappedRows] = []  # what is to be closed before the file; the finalizer's
        self._release = weakref.finalize(self, _release, self._fd, os.getpid() if self.writable else None, self._opened)
        try:
            self._open(file, dtype, cache, durability)
        except BaseException:
            self._release()
            raise

    def _open(self, file: Path, dtype: torch.dtype | None, cache: Cache, durability: Durability) -> None:
        if self.writable:
            lock_writer(self._fd, file)
        recover(file, self._fd if self.writable else None)
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
            if durability == "atomic" and header.fortran:
                raise ValueError(f"{self.name} is in Fortran order, its rows in pieces; durability='atomic' needs C order")
            reserve(self._fd, needed, file)
        self._rows: MappedRows | None = MappedRows(
            self._fd,
            header.shape,
            header.dtype,
            header.stored,
            offset=header.offset,
            fortran=header.fortran,
            writable=file if self.writable else None,
            durability=durability,
            cache=cache,
            name=self.name,
        )
        self._opened.append(self._rows)
        self.memory, self.durable = self._rows.memory, self._rows.durable
        self.guarded = self.writable
        if self.memory is not None and header.nbytes and not self.writable:
            self.page_cache = PageCache(self._fd, header, self.name)

    @property
    def identity(self) -> Hashable:
        return self._identity

    @property
    def committed_state(self) -> Any:
        """What ``Pipeline.flush`` saved with the rows, as ``state_dict`` gives it; None where nothing was, or not "atomic".

        Pass it to ``load_state_dict`` of the pipeline that goes on from there.
        """
        return None if self.durable is None else decode_state(self.durable.state)

    def resident(self) -> bool:
        """As ``Store.resident``; a file of up to 64 MiB is read in first."""
        return self._held().resident()

    def from_disk(self) -> bool:
        return self._held().from_disk

    def expect(self, rows: NDArray[np.int64]) -> None:
        self._held().expect(rows)

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._held().gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._held().scatter(rows, values)

    def _flush(self, sync: bool) -> None:
        if self.writable:
            self._held().flush(sync)

    def _flush_to_close(self) -> None:
        self._held().flush_to_close()

    def _close(self) -> None:
        self.memory, self._rows, self.page_cache = None, None, None
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


def _release(fd: int, writer: int | None, opened: list[MappedRows]) -> None:
    """Close the file, after what is beside it.

    The lock goes first, for views may keep the mapping, and it the lock; a forked child has neither.
    """
    while opened:
        opened.pop().close()
    if writer == os.getpid():
        unlock_writer(fd)
    os.close(fd)
