"""New values of rows on their way into a mapped file, kept beside it so that a kill leaves no row half written.

A row is copied into a mapping byte by byte; a process that is killed meanwhile leaves it half old and half new. So the rows
of a call are first copied into a small mapped file, marked whole, copied into their places, and unmarked. Whoever opens
the file after a kill finds the mark and copies them again. All in memory: no system call and nothing durable.

A mark outlives the process, not the machine: after a restart the mark may be on the disk and the rows not. So a file of an
earlier start is not believed.

Assumes:
- The caller holds the file's writer lock.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from ._records import as_records, runs

SUFFIX = ".redo"
_MAGIC = b"rowferry"
_BYTES = 1 << 20  # of rows in a slot: small enough to stay in a core's cache
_MOST_ROWS = 1 << 15
_HEADER = np.dtype(
    [("magic", "S8"), ("boot", "S36"), ("inode", "u8"), ("offset", "u8"), ("row_nbytes", "u8"), ("capacity", "u8")]
)
_MARK = np.dtype([("whole", "u8"), ("count", "u8")])


@final
class Redo:
    """Slots for the rows of calls that run at once, each with a capacity of about 1 MiB.

    Args:
        path: of the redo file; it is made when the first row is written and removed by ``close``.
        fd: the data file.
        offset, row_nbytes: where its rows lie.
    """

    def __init__(self, path: Path, fd: int, offset: int, row_nbytes: int) -> None:
        self._path, self._data = path, fd
        self._offset, self._row_nbytes = offset, row_nbytes
        self.capacity = min(max(_BYTES // row_nbytes, 1), _MOST_ROWS)
        self._idle: list[_Slot] = []  # append and pop are atomic
        self._count = 0
        self._fd = -1
        self._lock = threading.Lock()  # guards _fd and _count: one thread makes a slot at a time
        self._pid = os.getpid()

    @contextmanager
    def holding(self, rows: NDArray[np.int64], values: NDArray[np.uint8]) -> Iterator[None]:
        """While inside, a kill is made good by the next opening. At most ``capacity`` rows.

        Raises:
            OSError: there is no room on the disk for one more slot; nothing was done.
        """
        slot = self._idle.pop() if self._idle else self._make()
        try:
            slot.mark(rows, values)
            yield
        finally:
            slot.unmark()  # also after an error: later writes of the same rows may go through another slot
            self._idle.append(slot)

    def close(self) -> None:
        """Remove the file. In a forked child nothing: it is the parent's."""
        if self._fd >= 0 and self._pid == os.getpid():
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _make(self) -> _Slot:
        with self._lock:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                head = np.zeros(1, _HEADER)
                head[0] = (_MAGIC, _boot(), os.fstat(self._data).st_ino, self._offset, self._row_nbytes, self.capacity)
                os.pwrite(self._fd, head.tobytes(), 0)
            size = _slot_bytes(self.capacity, self._row_nbytes)
            start = mmap.PAGESIZE + self._count * size
            os.posix_fallocate(self._fd, start, size)  # else writing to the mapping might find the disk full
            slot = _Slot(mmap.mmap(self._fd, size, offset=start), self.capacity, self._row_nbytes)
            self._count += 1
            return slot


@final
class _Slot:
    """A mark, row numbers and rows, in mapped memory. One thread."""

    def __init__(self, mapped: mmap.mmap, capacity: int, row_nbytes: int) -> None:
        self._mark = np.frombuffer(mapped, _MARK, 1)
        self._rows = np.frombuffer(mapped, np.int64, capacity, mmap.PAGESIZE)
        self._values = np.frombuffer(mapped, np.uint8, capacity * row_nbytes, mmap.PAGESIZE + _pages(8 * capacity))
        self._row_nbytes = row_nbytes

    def mark(self, rows: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        np.copyto(self._values[: values.size], values)
        np.copyto(self._rows[: rows.size], rows)
        self._mark["count"] = rows.size
        self._mark["whole"] = 1  # last: a kill before it leaves the rows' places untouched

    def unmark(self) -> None:
        self._mark["whole"] = 0

    def write_to(self, fd: int, offset: int) -> int:
        """Write marked rows to their places in the file. How many there were."""
        if not int(self._mark["whole"][0]):
            return 0
        rows = self._rows[: int(self._mark["count"][0])]
        write_rows(fd, offset, self._row_nbytes, rows, self._values[: rows.size * self._row_nbytes])
        return int(rows.size)


def finish(path: Path, fd: int) -> int:
    """Write the rows that a killed process was writing, and remove the redo file. How many rows there were.

    Args:
        path: of the redo file.
        fd: the data file, open to write and locked.
    """
    done = 0
    with path.open("r+b") as file:
        raw = file.read(_HEADER.itemsize)
        head = np.frombuffer(raw, _HEADER)[0] if len(raw) == _HEADER.itemsize else np.zeros(1, _HEADER)[0]
        here = (head["magic"], head["boot"], int(head["inode"])) == (_MAGIC, _boot(), os.fstat(fd).st_ino)
        if here:
            capacity, row_nbytes = int(head["capacity"]), int(head["row_nbytes"])
            size = _slot_bytes(capacity, row_nbytes)
            for start in range(mmap.PAGESIZE, os.fstat(file.fileno()).st_size - size + 1, size):
                slot = _Slot(mmap.mmap(file.fileno(), size, offset=start), capacity, row_nbytes)
                done += slot.write_to(fd, int(head["offset"]))
    path.unlink()
    return done


def write_rows(fd: int, offset: int, row_nbytes: int, rows: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
    """Write whole rows to a file, run by run, by system calls."""
    records = as_records(values, row_nbytes)
    starts, lengths = runs(rows)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        view = memoryview(records[start : start + length].tobytes())
        place = offset + int(rows[start]) * row_nbytes
        while view:
            done = os.pwrite(fd, view, place)
            view, place = view[done:], place + done


def _slot_bytes(capacity: int, row_nbytes: int) -> int:
    return mmap.PAGESIZE + _pages(8 * capacity) + _pages(capacity * row_nbytes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _boot() -> bytes:
    """What this start of the machine is called."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
