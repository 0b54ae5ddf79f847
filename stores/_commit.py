"""Files that change together: one record says which commit each of them is at, and what the pipeline's state was.

A commit: the files are made durable, then the record is replaced by the next generation's, then the undo files are emptied.
An undo file leads back to the generation in its header. Where the record is newer, the commit was completed and its rows
stay; where it is the same, the rows go back. So it takes one rename to commit any number of files.

Assumes:
- The caller holds each data file's writer lock, or finds out that nobody does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from . import _undo
from ._commit_record import SUFFIX, Record, beside_file, home_of, read_record, write_record

_log = logging.getLogger("rowferry")


@final
class Durable:
    """One data file that is opened for writing with ``durability="atomic"``.

    Args:
        path: of the file, which is recovered.
        fd: the file, locked; the caller's for as long as this is used.
        rows, offset, row_nbytes: what it holds, and where.
        read: ``read(rows, out)`` copies rows as they are in the file, byte for byte.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        rows: int,
        read: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
        *,
        offset: int,
        row_nbytes: int,
    ) -> None:
        self.path = path.resolve()
        self.fd = fd
        self.home = home_of(self.path)  # the record that it was last committed by, before this process
        self.undo = _undo.Undo(beside_file(self.path, _undo.SUFFIX), fd, rows, read, offset, row_nbytes)
        self.group: Group | None = None
        self._pid = os.getpid()

    @property
    def state(self) -> Any:
        """What was saved with the last commit; None if nothing was."""
        if self.group is not None:
            return self.group.state
        return None if self.home is None else self.home[1].state

    @property
    def label(self) -> str:
        """What the record calls the file: its path from there."""
        place = self.home[0] if self.group is None and self.home is not None else None
        folder = place.parent if place is not None else self.group.folder if self.group is not None else self.path.parent
        return os.path.relpath(self.path, folder)

    def protect(self, rows: NDArray[np.int64]) -> None:
        """Before ``rows`` are overwritten. OSError: they must not be."""
        if self.group is None:
            join([self])
        self.undo.protect(rows)

    def flush(self) -> None:
        """Commit what was written since, with the files that this one changes together with, and without a state."""
        if self.group is not None and self.group.dirty and self._pid == os.getpid():  # a forked child commits nothing
            self.group.commit(None)

    def flush_to_close(self) -> None:
        """As ``flush``; but what a pipeline wrote, only its own ``flush`` and its orderly end commit."""
        if self.group is not None and self.group.owned and self.group.dirty:
            _log.warning("%s has rows that no flush() covers; they are rolled back when it is opened again", self.path)
        else:
            self.flush()

    def close(self) -> None:
        """Give the handle up. The undo file stays: it leads to the record."""
        self.undo.close()


@final
class Group:
    """Open files that commit at once. One thread at a time.

    Attributes:
        state: of the last commit.
        owned: a pipeline writes the files, or did and did not end orderly: closing a file does not commit then.
    """

    def __init__(self, files: Sequence[Durable], record: Path, generation: int, state: Any) -> None:
        self._files = tuple(files)
        self._record = record
        self._generation = generation
        self.state = state
        self.owned = False

    @property
    def dirty(self) -> bool:
        """Whether a row was changed since the last commit."""
        return any(file.undo.dirty for file in self._files)

    @property
    def folder(self) -> Path:
        """Where its record is."""
        return self._record.parent

    def holds(self, files: Sequence[Durable]) -> bool:
        """Whether these are its files."""
        return {file.path for file in files} == {file.path for file in self._files}

    def commit(self, state: Any) -> None:
        """Make all that was written durable, as one step.

        Raises:
            OSError: the disk is full, or failed; nothing is committed, and the call may be made again.
        """
        for file in self._files:
            os.fsync(file.fd)
        stores = tuple(os.path.relpath(file.path, self._record.parent) for file in self._files)
        try:
            write_record(self._record, Record(self._generation + 1, stores, state))
        except OSError:
            last = read_record(self._record)
            if last is None or last.generation == self._generation:
                raise
            self._advance(state)  # it got its name, and failed after that: undo files must lead back to it
            raise
        self._advance(state)

    def _advance(self, state: Any) -> None:
        self._generation, self.state = self._generation + 1, state
        self.settle()

    def dissolve(self) -> None:
        """Commit what was written; each file is alone then, as after opening."""
        if self.dirty:
            self.commit(None)
        for file in self._files:
            file.group, file.home = None, home_of(file.path)

    def settle(self) -> None:
        """Empty the undo files for the generation that is committed."""
        for file in self._files:
            file.undo.reset(os.path.relpath(self._record, file.path.parent), self._generation)


def join(files: Sequence[Durable]) -> Group:
    """From now on these files commit at once. What they have changed alone, or with others, is committed first.

    Raises:
        OSError: no room for the record.
    """
    for file in files:
        if file.group is not None and file.group.holds(files):
            return file.group
    for file in files:
        if file.group is not None:
            file.group.dissolve()
    group = _continued(files)
    if group is None:
        place = beside_file(files[0].path, SUFFIX)
        last = read_record(place)
        newest = max(last.generation if last is not None else 0, *(file.undo.last_generation for file in files))
        group = Group(files, place, newest, None)
        group.commit(None)
    else:
        group.settle()
    for file in files:
        file.group = group
    return group


def _homes(files: Sequence[Durable]) -> list[tuple[Path, Record]]:
    return [file.home for file in files if file.home is not None]


def _continued(files: Sequence[Durable]) -> Group | None:
    """The group that just these files were in when they were last committed."""
    homes = _homes(files)
    if len(homes) != len(files) or len({place for place, _ in homes}) > 1:
        return None
    place, record = homes[0]
    if len(record.stores) != len(files):
        return None
    return Group(files, place, record.generation, record.state)
