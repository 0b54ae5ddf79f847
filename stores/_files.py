"""Files that are locked by one writer, have their space reserved, and appear whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Mode = Literal["r", "r+"]
"""How a file or array is opened: to read, or to read and write."""

_AT_CWD, _RENAME_EXCHANGE = -100, 2  # of fcntl.h and stdio.h
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def lock_writer(fd: int, path: Path) -> None:
    """Lock an open file against other writers of rowferry, in this process or another, until its last handle closes.

    The system gives the lock up when the process dies. Readers are not kept out.

    Raises:
        BlockingIOError: another writer has it; names its process where the system tells.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"{path} is open for writing in process {_holder(fd)} (this is process {os.getpid()}); "
            f"one writer at a time: close that store first, or open this one with mode='r'"
        ) from None


def unlock_writer(fd: int) -> None:
    """Give the lock up, also where a mapping of the file lives on."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def refuse_live_writer(path: Path) -> None:
    """Raise BlockingIOError when a store is open for writing on the file: what it wrote later would be lost with it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_writer(fd, path)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int, path: Path) -> None:
    """Give each of the file's first ``nbytes`` bytes a place on the disk; bytes that it has keep their value.

    Writing to a mapping of a sparse file on a full disk would kill the process (SIGBUS).

    Raises:
        OSError: the disk is too full, or the file system takes no file of that size.
    """
    missing = nbytes - os.fstat(fd).st_blocks * 512
    if missing <= 0:
        return
    disk = os.fstatvfs(fd)
    free = disk.f_bavail * disk.f_frsize
    try:
        if missing > free:  # asked first: a file system may fill itself to the brim before it says no
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        text = f"{error.strerror}: {path} needs {missing:,} more bytes of disk, {free:,} are free; make room first"
        raise OSError(error.errno, text) from error


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name in ``path``'s folder that nothing has, with its suffix; whatever has it at the end is removed."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to put {path.name} into; make it first")
    temporary = path.with_name(f".{path.stem[:100]}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a durable file its name, which nothing may have; of two that do this at once, one gets it.

    Raises:
        FileExistsError: ``path`` exists.
    """
    refuse_existing(path)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)  # a file system without hard links
    sync_folder(path.parent)


def replace(temporary: Path, path: Path) -> None:
    """Give a durable file or folder its name; what had it before has the temporary one then, or is gone.

    Raises:
        OSError: ``path`` is a folder, and this file system cannot exchange two in one step.
    """
    if path.is_dir() and temporary.is_dir():
        _exchange(temporary, path)
    else:
        os.replace(temporary, path)
    sync_folder(path.parent)


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError when there is anything at ``path``."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists; remove it, or choose another path")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        code = errno.ENOSYS
    elif rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
    else:
        return
    raise OSError(code, f"{os.strerror(code)}: {other} exists and cannot be replaced in one step here; remove it first")


def _holder(fd: int) -> str:
    """The process that has the lock, from the system's list of locks; ``unknown`` where that does not tell."""
    inode = os.fstat(fd).st_ino
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for line in lines:
            fields = line.split()  # number, kind, ADVISORY, WRITE, process, device:inode, ...
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
                return fields[4]
    return "unknown"
