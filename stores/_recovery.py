"""Opening a file that a process left in the middle of writing: rows are finished, or rolled back to the last commit.

Assumes:
- The caller holds the data file's writer lock, or finds out that nobody does.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from . import _redo, _undo
from ._commit_record import beside_file, home_of, read_record
from ._files import lock_writer

_log = logging.getLogger("rowferry")


def recover(path: Path, fd: int | None = None) -> None:
    """Bring a file, and all that were committed with it, back to the last commit, and finish rows half written.

    Files that a live store writes are left to it. Cheap when there is nothing to do.

    Args:
        path: of the data file.
        fd: the same file, open to write and locked, if the caller has it so.

    Raises:
        PermissionError: there is something to do, and the file cannot be written. ValueError: the files beside it are
            broken, or of another file; the error says which to remove to open the file as it is.
    """
    real = path.resolve()
    members = [real]
    home = home_of(real)
    if home is not None:
        members += [home[0].parent / name for name in home[1].stores]
    for member in dict.fromkeys(each.resolve() for each in members):
        if member == real or member.exists():
            _recover_one(member, fd if member == real else None)


def forget(path: Path) -> None:
    """Remove what an atomic store left beside a recovered file: it is written without commits from now on."""
    home = home_of(path.resolve())
    beside_file(path, _undo.SUFFIX).unlink(missing_ok=True)
    if home is not None and len(home[1].stores) == 1:
        home[0].unlink(missing_ok=True)


def _recover_one(path: Path, fd: int | None) -> None:
    undo, redo = beside_file(path, _undo.SUFFIX), beside_file(path, _redo.SUFFIX)
    if not redo.exists() and (not undo.exists() or undo.stat().st_size <= _undo.HEADER_BYTES):
        return
    with contextlib.ExitStack() as stack:
        if fd is None:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            try:
                lock_writer(fd, path)
            except BlockingIOError:
                return  # its writer lives
        if redo.exists() and (count := _redo.finish(redo, fd)):
            _log.warning("%s: %d rows were being written when a process ended; they are written", path, count)
        if undo.exists():
            _roll_back(path, fd, undo)


def _roll_back(path: Path, fd: int, undo: Path) -> None:
    header = _undo.read_header(undo)
    if header is None:
        return
    remedy = f"remove {undo} to open the file as it is"
    seen = os.fstat(fd)
    if (header.inode, header.size) != (seen.st_ino, seen.st_size):
        raise ValueError(f"{undo} is of another file than {path}, which was replaced or changed its size; {remedy}")
    place = undo.parent / header.record
    record = read_record(place)
    if record is None or record.generation < header.generation:
        raise ValueError(f"{place}, the record of the last commit of {path}, is {'older' if record else 'gone'}; {remedy}")
    if record.generation == header.generation:
        count = 0
        for rows, values in _undo.records(undo, header):
            _redo.write_rows(fd, header.offset, header.row_nbytes, rows, values)
            count += len(rows)
        os.fsync(fd)
        if count:
            _log.warning("%s: %d rows were rolled back to the last flush()", path, count)
    os.truncate(undo, _undo.HEADER_BYTES)
