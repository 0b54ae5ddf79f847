"""Rows of a file, read where they lie in memory once all of it is there, else from the file, many at a time.

Guarantees:
- No Python call a row where the system has io_uring: a call reads all its rows, deep and without the GIL.
- Rows that are not in memory are read with errors (a bad sector, a file cut off) and without growing the mapping, so
  that a process's resident size stays flat over a file of any size.
- Any thread, several at once.

Assumes:
- Row numbers are in range. The file keeps its length; one that was cut off is an OSError where that is noticed.

No torch, as for ``_ring``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Callable
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from . import _ring
from ._records import as_records, runs

_log = logging.getLogger("rowferry")

Cache = Literal["keep", "drop"]
"""What becomes of the page cache behind rows that were read from a disk: it keeps their pages, or gives them up."""

_FEW = 8  # runs of rows that are quicker read one by one than listed
_SAMPLES = 256  # pages that are asked for before the whole file is taken to be in memory
_POPULATE_READ = 22  # of linux/mman.h, since 5.14
_PIECE = 256 << 20  # bytes of the mapping that are filled in by one call
_FEW_FAULTS = 64  # one row in so many may come from the disk before the file counts as no longer in memory
_TOUCHED = 64 << 20  # bytes of pages that writing may leave in the mapping, while the file is not all in memory
_libc = ctypes.CDLL(None, use_errno=True)


@final
class FileReads:
    """The rows of one file in C order.

    Which way a row goes is decided by what was measured. Reading through the mapping costs 0.25 us a row of 1 KiB where
    its page is mapped, 3 us where it is in memory and not mapped, and a whole turn of the disk where it is not. Reading
    from the file costs 1.5 us where it is in memory, and the disk's time over some 256 in flight where it is not. So
    the file is read until so many rows came without the disk that mapping all of it at once is cheaper, and a sample
    of pages says that all of it is there. When rows of the mapping come from the disk again, it was driven out.

    Args:
        fd: open to read, and kept open by the caller for as long as this is used. It is advised that reads are random.
        offset: where the first row begins.
        row_nbytes: at least 1.
        mapped: the same file's mapping, from byte 0 to the end of the last row.
        cache: "drop" gives pages up again that were brought in, and never maps the file whole.
        name: what errors call the file.

    Attributes:
        from_disk: rows of the last ``gather`` came from the disk, as far as is known.
    """

    def __init__(
        self, fd: int, *, offset: int, row_nbytes: int, mapped: mmap.mmap, cache: Cache = "keep", name: str = ""
    ) -> None:
        self._fd, self._offset, self._row_nbytes, self._name = fd, offset, row_nbytes, name
        self._mapped = mapped
        self._page = offset // mmap.PAGESIZE * mmap.PAGESIZE  # the first page with rows
        self._size = len(mapped) - self._page
        self._keep = cache == "keep"
        self._in_memory = False
        self.from_disk = True
        self._warm = 0  # rows that came without the disk since one came from it; threads may lose counts, no matter
        self._touched = 0  # bytes of pages that scatters have mapped since the last release
        self._filling = threading.Lock()  # held by the one thread that maps the file whole
        self._advising = threading.Lock()  # held by the one thread that makes a Python call a row, where there is no ring
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # reads what is asked for; long runs are asked for at once

    @property
    def in_memory(self) -> bool:
        """Whether all rows were found in memory and are mapped."""
        return self._in_memory

    def gather(self, rows: NDArray[np.int64], data: NDArray[np.uint8], copy: Callable[[], None]) -> bool:
        """Rows into ``data`` (``len(rows) * row_nbytes`` bytes), as they are in the file, or by ``copy``, from the mapping.

        Returns:
            Whether ``copy`` was called.

        Raises:
            OSError: the file was cut off, or what the disk said.
        """
        self._refuse_cut(rows)
        if self._in_memory:
            self.from_disk = False
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
            copy()
            if (resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before) * _FEW_FAULTS > len(rows):
                self._leave_memory()
            return True
        starts, lengths = runs(rows)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        by_mapping = len(starts) > _FEW and not _ring.available()
        if by_mapping:
            self._advise(rows[starts], lengths)
            copy()
        else:
            self._read(rows[starts], starts, lengths, data)
        if not self._keep:
            self._drop(rows)
        elif (resource.getrusage(resource.RUSAGE_THREAD).ru_inblock - before) * 512 * _FEW_FAULTS > data.nbytes:
            self._warm, self.from_disk = 0, True
        else:
            self._warm, self.from_disk = self._warm + len(rows), False
            if 2 * self._warm * mmap.PAGESIZE > self._size:
                self._fill_mapping()
        return by_mapping

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Have the disk fetch rows that are a few long runs; of others ``gather`` has as many in flight."""
        if self._in_memory or not rows.size:
            return
        starts, lengths = runs(rows)
        if len(starts) > _FEW:
            return
        for first, length in zip(rows[starts].tolist(), lengths.tolist(), strict=True):
            place = self._offset + first * self._row_nbytes
            os.posix_fadvise(self._fd, place, length * self._row_nbytes, os.POSIX_FADV_WILLNEED)

    def read_raw(self, rows: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """Rows as they are in the file, byte for byte."""
        self._refuse_cut(rows)
        starts, lengths = runs(rows)
        if self._in_memory or (len(starts) > _FEW and not _ring.available()):
            flat = np.frombuffer(self._mapped, np.uint8)[self._offset :]
            whole = flat[: len(flat) // self._row_nbytes * self._row_nbytes]
            np.take(as_records(whole, self._row_nbytes), rows, axis=0, out=as_records(data, self._row_nbytes), mode="clip")
        else:
            self._read(rows[starts], starts, lengths, data)

    def before_scatter(self, rows: NDArray[np.int64]) -> None:
        """Bring the pages in that a write of rows through the mapping would read one after the other."""
        self._refuse_cut(rows)
        if self._in_memory or not _ring.available():
            return
        starts, lengths = runs(rows)
        if len(starts) > _FEW and not self.resident(16, rows):
            self._read(rows[starts], starts, lengths, np.empty(len(rows) * self._row_nbytes, np.uint8))

    def after_scatter(self, rows: NDArray[np.int64]) -> None:
        """Rows were written through the mapping: give its pages back now and then, so that it does not grow."""
        if self._in_memory:
            return
        self._touched += len(rows) * (-(-self._row_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if self._touched > _TOUCHED:
            self._touched = 0
            self._release()

    def resident(self, samples: int = _SAMPLES, rows: NDArray[np.int64] | None = None) -> bool:
        """Whether a sample of pages (spread over the file, or of ``rows``) is in memory. True where the system can't tell."""
        if rows is None:
            places = np.linspace(self._offset, len(self._mapped) - 1, samples).astype(np.int64)
        else:
            places = self._offset + rows[np.linspace(0, len(rows) - 1, min(samples, len(rows))).astype(np.int64)] * (
                self._row_nbytes
            )
        one = bytearray(1)
        for place in places.tolist():
            try:
                os.preadv(self._fd, [one], place, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                return True  # a file system in memory, or one that knows no such question
        return True

    def read_through(self) -> None:
        """Bring all of a small file into memory."""
        piece = memoryview(bytearray(min(self._size, _PIECE >> 4)))
        for start in range(0, self._size, len(piece)):
            self._read_run(self._page + start, piece[: self._size - start])

    # ---- reading from the file ------------------------------------------------------------------------------

    def _read(
        self, firsts: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        """Runs of rows: ``lengths`` of them from ``firsts`` on, to the places from ``starts`` on."""
        size = self._row_nbytes
        offsets, targets, nbytes = self._offset + firsts * size, starts * size, lengths * size
        try:
            if len(starts) > _FEW or (data.nbytes > _PIECE >> 8 and _ring.available()):
                _ring.read(self._fd, offsets, targets, nbytes, data.data)
                return
            for offset, target, length in zip(offsets.tolist(), targets.tolist(), nbytes.tolist(), strict=True):
                self._read_run(offset, data.data[target : target + length])
        except EOFError as error:
            raise self._cut_off() from error
        except OSError as error:
            error.add_note(f"while rows of {self._name} were read")
            raise

    def _read_run(self, offset: int, view: memoryview) -> None:
        while view:
            done = os.preadv(self._fd, [view], offset)
            if not done:
                raise EOFError
            view, offset = view[done:], offset + done

    def _advise(self, firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Ask for the pages of runs, so that the disk works on many at a time while they are copied. One thread at a time."""
        with self._advising:
            if self.resident(32, firsts):
                return
            for first, length in zip((self._offset + firsts * self._row_nbytes).tolist(), lengths.tolist(), strict=True):
                os.posix_fadvise(self._fd, first, length * self._row_nbytes, os.POSIX_FADV_WILLNEED)

    def _drop(self, rows: NDArray[np.int64]) -> None:
        first, last = int(rows.min()), int(rows.max())
        os.posix_fadvise(
            self._fd, self._offset + first * self._row_nbytes, (last + 1 - first) * self._row_nbytes, os.POSIX_FADV_DONTNEED
        )

    def _refuse_cut(self, rows: NDArray[np.int64]) -> None:
        """A mapping of a file that was cut off would kill the process when it is read."""
        if os.fstat(self._fd).st_size < self._offset + (int(rows.max()) + 1) * self._row_nbytes:
            raise self._cut_off()

    def _cut_off(self) -> OSError:
        size = os.fstat(self._fd).st_size
        return OSError(errno.EIO, f"{self._name} was cut off at byte {size:,} since it was opened")

    # ---- the mapping ----------------------------------------------------------------------------------------

    def _fill_mapping(self) -> None:
        """Map the whole file, if all of it seems to be in memory. Other threads go on reading from the file meanwhile."""
        if not self._filling.acquire(blocking=False):
            return
        try:
            self._warm = 0
            if self._in_memory or not self.resident():
                return
            for start in range(0, self._size, _PIECE):
                before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
                if not self._advise_mapping(_POPULATE_READ, start, min(_PIECE, self._size - start)):
                    break  # an older kernel: pages are mapped one by one as they are used
                if (resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before) * mmap.PAGESIZE > _PIECE // _FEW_FAULTS:
                    return
            self._in_memory = True
            _log.info("%s is in memory, and mapped; its rows are copied from there", self._name)
        finally:
            self._filling.release()

    def _leave_memory(self) -> None:
        self._in_memory, self._warm, self.from_disk = False, 0, True
        self._release()
        _log.info("%s is no longer all in memory; its rows are read from the file", self._name)

    def _release(self) -> None:
        self._advise_mapping(mmap.MADV_DONTNEED, 0, self._size)

    def _advise_mapping(self, advice: int, start: int, length: int) -> bool:
        """madvise without the GIL; False where the kernel does not know it."""
        base = np.frombuffer(self._mapped, np.uint8).ctypes.data + self._page
        if _libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(length), advice) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        raise OSError(code, os.strerror(code), self._name)


def check_cache(cache: Any) -> None:
    """Raise ValueError for what is no way to treat the page cache."""
    if cache not in ("keep", "drop"):
        raise ValueError(f"cache is {cache!r}; it must be 'keep' (leave what was read in the page cache) or 'drop'")
