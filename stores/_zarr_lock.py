"""One writer a zarr directory, with the disk space of what it will write; many readers or one writer a store.

Guarantees:
- While a ``DirectoryLock`` is held, no other one on that directory is, in this process or another.
- A process that dies gives up its lock with it; what it leaves is an unlocked file that the next lock takes over.
- Space that ``reserve`` returned for cannot be taken by others until ``release`` or ``close``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

LOCK_NAME = ".rowferry.lock"  # beside the metadata; zarr readers look up keys and never see it
_HEAD = 64  # bytes at the file's start that name the process


@final
class DirectoryLock:
    """A locked file in a directory; what it is longer than its head is disk space kept for the directory's chunks.

    Raises:
        BlockingIOError: another writer holds the directory; names its process.
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._pid = os.getpid()
        self._reserved = 0
        self._fd = self._take()
        os.ftruncate(self._fd, 0)  # space that a killed writer had reserved
        os.pwrite(self._fd, str(self._pid).encode().ljust(_HEAD), 0)

    def _take(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A writer that ended between our open and our lock removed the file: then this lock locks nothing.
                if self._path.exists() and os.path.samestat(os.fstat(fd), self._path.stat()):
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, _HEAD, 0).decode().strip() or "unknown"
                os.close(fd)
                raise BlockingIOError(
                    f"{self._path.parent} is open for writing in process {holder} (this is process {self._pid}); "
                    f"one writer at a time: close that store first, or open this one with mode='r'"
                ) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def reserve(self, nbytes: int, room: int) -> None:
        """Keep ``nbytes`` of disk for this directory, and see that ``room`` bytes more are free now.

        Raises:
            OSError: the disk is too full; nothing is reserved.
        """
        if not nbytes and not room:
            return
        disk = os.statvfs(self._path.parent)
        free = disk.f_bavail * disk.f_frsize
        try:
            if nbytes + room > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                os.posix_fallocate(self._fd, _HEAD, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, _HEAD)
            raise OSError(
                error.errno,
                f"{self._path.parent} needs {nbytes + room:,} bytes of disk to be written ({nbytes:,} for chunks that do not "
                f"exist yet, {room:,} to replace chunks); {free:,} are free. Make room, or open it with mode='r'",
            ) from error
        self._reserved = nbytes

    def release(self, nbytes: int) -> None:
        """Give ``nbytes`` back to the disk, for a chunk that is about to be written."""
        if self._reserved:
            self._reserved = max(self._reserved - nbytes, 0)
            os.ftruncate(self._fd, _HEAD + self._reserved)

    def close(self) -> None:
        """Give up lock and space. In a forked child only its copy of the handle: the lock is the parent's."""
        if self._fd < 0:
            return
        if os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


@final
class ReadersWriter:
    """Any number of readers, or one writer. A waiting writer goes before readers that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the counts; notified when readers reach 0 or a writer leaves
        self._readers = 0
        self._writers = 0  # waiting or at work
        self._at_work = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._writers)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._writers += 1
            try:
                self._changed.wait_for(lambda: not self._readers and not self._at_work)
            except BaseException:
                self._writers -= 1
                self._changed.notify_all()
                raise
            self._at_work = True
        try:
            yield
        finally:
            with self._changed:
                self._at_work = False
                self._writers -= 1
                self._changed.notify_all()
