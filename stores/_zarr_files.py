"""The files of an uncompressed zarr array, mapped while they are in use and for as long as there is room.

Guarantees:
- A file is opened once while it is held or cached, its shard index read and checked once; both are bounded.
- A file that is held stays mapped. One that was replaced is opened anew by the next ``hold`` after ``invalidate``.
- That a file does not exist is never remembered.

Assumes:
- Somebody calls ``invalidate`` when files were replaced.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from ._pages import PAGE, Arena, resident_file_bytes, whole_pages
from ._zarr_layout import RawLayout, chunk_places

MOST_FILES = 8192  # mapped at a time; Linux lets a process have 65,530 mappings, and a file may take two
MOST_INDEX_BYTES = 64 << 20  # shard indices held
MOST_ADDRESSES = 1 << 44  # of 2**47
RESIDENT_BYTES = 1 << 30  # most of mapped files that counts as this process's memory, or a sixteenth of the machine's
_FAULT_BYTES = 64 << 10  # what one access maps at most of what is in the page cache


class Unmappable(Exception):
    """The rows can be read, but not from a mapping: a member that is compressed, a shard with gaps."""


class Medium(Protocol):
    """Where files come from. ``place`` and ``clear`` are called by one thread at a time."""

    memory: NDArray[np.uint8]
    capacity: int

    @property
    def root(self) -> str | None:
        """The folder whose files these are, by their keys; None where they are none."""

    def place(self, slot: int, key: str) -> tuple[int, int] | None:
        """Bring a file into ``memory``: where it starts and its bytes; None when there is none."""

    def clear(self, slot: int) -> None:
        """The file of this slot is not used any more."""

    def will_need(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
        """These byte ranges of ``memory`` will be read. Whether a disk was asked for them."""


@final
class Folder:
    """Chunk files under a directory."""

    def __init__(self, root: Path, nbytes: int, unit: int, most: int) -> None:
        """For files of at most ``nbytes`` bytes; they start at whole multiples of ``unit`` where addresses last."""
        self.root = os.fspath(root)
        stride = whole_pages(nbytes, unit)
        if stride * min(most, 64) > MOST_ADDRESSES:
            stride = whole_pages(nbytes)
        self.capacity = max(min(most, MOST_FILES, MOST_ADDRESSES // stride), 1)
        self._arena = Arena(self.capacity, stride)
        self.memory = self._arena.memory
        self._resident = 0  # bytes of this arena's files that count as this process's memory, at most
        self._others = resident_file_bytes()  # of other files, when it was last looked at

    def place(self, slot: int, key: str) -> tuple[int, int] | None:
        try:
            fd = os.open(os.path.join(self.root, key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes > self._arena.stride:
                raise Unmappable(f"{self.root}/{key} has {nbytes:,} bytes, more than its chunks need")
            if nbytes:
                self._arena.place(slot, fd, nbytes)
        finally:
            os.close(fd)
        return slot * self._arena.stride, nbytes

    def clear(self, slot: int) -> None:
        self._arena.clear(slot)

    def will_need(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
        # At most so much more than when it was last looked at; several threads may count wrongly, which does no harm.
        self._resident += starts.size * _FAULT_BYTES + int((stops - starts).sum())
        most = min(RESIDENT_BYTES, os.sysconf("SC_PHYS_PAGES") * PAGE // 16)
        if self._resident > most:
            now = resident_file_bytes()
            if now - self._others > most:
                self._arena.forget()
                self._others = now = resident_file_bytes()
            self._resident = max(now - self._others, 0)
        return self._arena.will_need(starts, stops)


@final
class Zip:
    """Stored members of a zip file, which is mapped whole."""

    root: str | None = None

    def __init__(self, path: Path, most: int) -> None:
        self.capacity = max(min(most, MOST_FILES), 1)
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with zipfile.ZipFile(file) as archive:
                self._members = {each.filename: each for each in archive.infolist()}
        self._map.madvise(mmap.MADV_RANDOM)
        self.memory = np.frombuffer(self._map, np.uint8)

    def place(self, slot: int, key: str) -> tuple[int, int] | None:
        member = self._members.get(key)
        if member is None:
            return None
        if member.compress_type != zipfile.ZIP_STORED:
            raise Unmappable(f"member {key!r} is compressed")
        at = member.header_offset + 26  # two lengths end the fixed part of a member's own header
        name, extra = struct.unpack_from("<HH", self._map, at)
        return at + 4 + name + extra, member.file_size

    def clear(self, slot: int) -> None:
        """Nothing to do: the archive stays mapped."""

    def will_need(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
        """Nothing: pages come as they are touched."""
        return False


@final
class ChunkFiles:
    """Slots for the files of one array.

    Attributes:
        memory: what places count in.
        places: ``(slots + 1, chunks in a file)``: where a chunk starts, -1 if it is not there. The last slot, which -1
            picks too, has none of them. Rows of slots that are held do not change.
        most: files that one ``hold`` may ask for.
        from_disk: a disk was asked for what ``will_need`` was told last.
    """

    def __init__(self, medium: Medium, layout: RawLayout, key_of: Callable[[int], str], name: str) -> None:
        self._medium = medium
        self.from_disk = False
        self._layout = layout
        self._key_of = key_of
        self._name = name
        chunks = layout.index.chunks if layout.index is not None else 1
        self.capacity = max(min(medium.capacity, MOST_INDEX_BYTES // (8 * chunks)), 1)
        self.most = max(self.capacity // 4, 1)
        self.memory = medium.memory
        self.places = np.full((self.capacity + 1, chunks), -1, np.int64)
        self._changed = threading.Condition()  # guards all below; notified when a hold ends
        self._slots: dict[int, int] = {}
        self._files = np.full(self.capacity, -1, np.int64)  # by slot; -1: free, or replaced and held by somebody still
        self._holds = np.zeros(self.capacity, np.int64)
        self._used = np.zeros(self.capacity, np.int64)  # when, to find what was not used for longest
        self._time = 0

    @contextmanager
    def hold(self, files: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The slots of distinct ``files`` (at most ``most``), -1 for one that does not exist. They stay until the end.

        Raises:
            OSError: a file cannot be read, is broken or cut off. Unmappable: see there.
        """
        with self._changed:
            slots = self._take(files.tolist())
            held = slots[slots >= 0]
        try:
            yield slots
        finally:
            with self._changed:
                self._holds[held] -= 1
                self._changed.notify_all()

    def will_need(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """These byte ranges of ``memory`` are about to be read."""
        self.from_disk = self._medium.will_need(starts, stops)

    def invalidate(self, files: Iterable[int] | None = None) -> None:
        """These files, or all, may have been replaced."""
        with self._changed:
            for file in list(self._slots) if files is None else files:
                slot = self._slots.pop(file, None)
                if slot is not None:
                    self._files[slot] = -1
                    self._used[slot] = -1  # taken before any other

    def _take(self, files: list[int]) -> NDArray[np.int64]:
        slots, missing, idle = self._found(files)
        while idle.size < missing.size:  # nothing is held meanwhile: of threads that wait, each could hold what others need
            self._changed.wait()
            slots, missing, idle = self._found(files)
        self._time += 1
        known = slots[slots >= 0]
        self._holds[known] += 1
        taken: list[int] = []
        try:
            for place, slot in zip(missing.tolist(), idle.tolist(), strict=False):
                if self._open(files[place], slot):
                    slots[place] = slot
                    self._holds[slot] += 1
                    taken.append(slot)
        except BaseException:
            self._holds[known] -= 1
            self._holds[taken] -= 1
            self._changed.notify_all()
            raise
        self._used[slots[slots >= 0]] = self._time
        return slots

    def _found(self, files: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The slots of files, -1 for one that has none; places of those; slots for them, the longest unused first."""
        slots = np.array([self._slots.get(file, -1) for file in files], np.int64)
        missing = np.flatnonzero(slots < 0)
        if not missing.size:
            return slots, missing, missing
        free = self._holds == 0
        free[slots[slots >= 0]] = False
        idle = np.flatnonzero(free)
        return slots, missing, idle[np.argsort(self._used[idle], kind="stable")]

    def _open(self, file: int, slot: int) -> bool:
        self._slots.pop(int(self._files[slot]), None)
        self._files[slot] = -1
        self._medium.clear(slot)
        self.places[slot] = -1
        key = self._key_of(file)
        found = self._medium.place(slot, key)
        if found is None:
            return False
        self.places[slot] = self._chunks(*found, f"chunk {key!r} of {self._name}")
        self._files[slot], self._slots[file] = file, slot
        return True

    def _chunks(self, start: int, nbytes: int, name: str) -> NDArray[np.int64]:
        index, chunk_nbytes = self._layout.index, self._layout.chunk_nbytes
        needed = chunk_nbytes if index is None else index.nbytes
        if nbytes < needed or (index is None and nbytes != needed):
            raise OSError(errno.EIO, f"{name} has {nbytes:,} bytes and needs {needed:,}; it was cut off or not copied whole")
        if index is None:
            return np.array([start])
        at = start if index.at_start else start + nbytes - needed
        try:
            inside = chunk_places(index, self.memory[at : at + needed], nbytes, chunk_nbytes, name)
        except ValueError as error:
            raise OSError(errno.EIO, str(error)) from error
        return np.where(inside < 0, -1, inside + start)
