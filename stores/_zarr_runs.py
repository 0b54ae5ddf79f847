"""Rows that follow one another in the chunk files of an uncompressed zarr array: a run of them is read by one call.

A mapping costs as much again as the copy out of it: its pages are mapped and taken away one by one. Here nothing is
mapped, and the disk has the files of the next runs to work on while one is waited for.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ._rows import distinct_places
from ._zarr_layout import RawLayout

LEAST_BYTES = 128 << 10  # of a run, on average: of shorter ones a mapping is no slower, and one call copies them all
AHEAD = 32  # files that may be open, with their bytes on the way


class _Rest(NamedTuple):
    """What a run lacks: the bytes from ``offset`` on, which go into ``view``."""

    fd: int
    view: memoryview
    offset: int


@final
class RunReader:
    """Reads whole rows of an array that is not sharded, one file a chunk, rows on disk as in memory. Any thread.

    Args:
        root: the folder that keys count from.
        layout: of the array.
        key_of: the key of a chunk by its number.
        fill: bytes of a row whose chunk does not exist; None to leave such rows to the caller.
        name: what errors call the array.

    Attributes:
        from_disk: of the rows read last some were waited for.
    """

    def __init__(
        self, root: str, layout: RawLayout, key_of: Callable[[int], str], fill: NDArray[np.uint8] | None, name: str
    ) -> None:
        self._root, self._key_of, self._fill, self._name = root, key_of, fill, name
        self.from_disk = False
        self._chunk_rows, self._chunk_nbytes = layout.chunk[0], layout.chunk_nbytes
        self._row_nbytes = self._chunk_nbytes // self._chunk_rows

    def gather(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> bool:
        """Rows into ``out`` (``len(rows) * row_nbytes`` bytes), unless runs are short or a file is none that can be read so.

        Returns:
            Whether all of ``out`` is right; if not, it may be written in part.

        Raises:
            OSError: what the disk said, or a file is cut off while it is read.
        """
        new = np.flatnonzero((rows[1:] != rows[:-1] + 1) | (rows[1:] % self._chunk_rows == 0)) + 1
        if out.nbytes < LEAST_BYTES * (new.size + 1):
            return False
        self.from_disk, rests = False, deque[_Rest]()
        try:
            for start, stop in itertools.pairwise([0, *new.tolist(), rows.size]):
                view = out[start * self._row_nbytes : stop * self._row_nbytes]
                if not self._begin(int(rows[start]), view, rests):
                    return False
                if len(rests) > AHEAD:
                    self._finish(rests.popleft())
            while rests:
                self._finish(rests.popleft())
        except OSError as error:
            error.add_note(f"while rows of {self._name} were read")
            raise
        finally:
            for rest in rests:
                os.close(rest.fd)
        return True

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Have the disk fetch chunks, unless too few of their rows are among these (in any order), or they are in memory."""
        chunks, _ = distinct_places(rows // self._chunk_rows)
        if rows.size * self._row_nbytes < LEAST_BYTES * chunks.size or all(
            self._advise(int(chunks[at]), ask=False) for at in (0, chunks.size // 2, -1)
        ):
            return
        for chunk in chunks.tolist():
            self._advise(chunk)

    def _advise(self, chunk: int, *, ask: bool = True) -> bool:
        """Whether the first byte of a chunk is in memory, or there is no such chunk; if not, ``ask`` for all of it."""
        try:
            fd = os.open(self._path(chunk), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True  # whoever reads it will say so
        try:
            there = bool(_in_memory(fd, bytearray(1), 0))
            if ask and not there:
                os.posix_fadvise(fd, 0, self._chunk_nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
        return there

    def _path(self, chunk: int) -> str:
        return os.path.join(self._root, self._key_of(chunk))

    def _begin(self, first: int, view: NDArray[np.uint8], rests: deque[_Rest]) -> bool:
        """Copy what is in memory of the run that begins with row ``first``, and have the disk fetch the rest."""
        chunk, inside = divmod(first, self._chunk_rows)
        try:
            fd = os.open(self._path(chunk), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._fill is None:
                return False
            view.reshape(-1, self._row_nbytes)[:] = self._fill
            return True
        try:
            if os.fstat(fd).st_size != self._chunk_nbytes:
                return False
            offset = inside * self._row_nbytes
            done = _in_memory(fd, view.data, offset)
            if done < view.nbytes:
                os.posix_fadvise(fd, offset + done, view.nbytes - done, os.POSIX_FADV_WILLNEED)
                self.from_disk = True
                rests.append(_Rest(fd, view.data[done:], offset + done))
                fd = -1
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def _finish(self, rest: _Rest) -> None:
        fd, view, offset = rest
        try:
            while view:
                done = os.preadv(fd, [view], offset)
                if not done:
                    raise OSError(errno.EIO, f"a chunk file of {self._name} was cut off at byte {offset:,} while it was read")
                view, offset = view[done:], offset + done
        finally:
            os.close(fd)


def _in_memory(fd: int, view: Any, offset: int) -> int:
    """Bytes that came without waiting for a disk."""
    try:
        return os.preadv(fd, [view], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # a file system that knows no such question
            raise
        return 0
