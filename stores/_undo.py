"""Values of rows before their first change since the last commit, durable before the row is overwritten.

A file of records behind two pages, each with a header: the newest whole one counts, so that at no moment there is none. A
record counts when it is whole (a checksum over its generation, row numbers and values says so) and of the header's
generation, so that a file that was filled again never shows an older one's.

Assumes:
- The caller holds the data file's writer lock.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ._files import sync_folder

SUFFIX = ".undo"
_PAGE = 4096
HEADER_BYTES = 2 * _PAGE
_RECORD = np.dtype([("magic", "S8"), ("generation", "u8"), ("count", "u8"), ("sum", "u8")])
_MAGIC = b"rowferry"


@dataclass(frozen=True)
class Header:
    """What an undo file belongs to.

    Attributes:
        record: of the commit, a path relative to the undo file's folder.
        generation: of the commit that the records lead back to; counts up over the file's life.
        inode, size: of the data file; another file of the same name is not touched.
        offset, row_nbytes: where its rows lie.
    """

    record: str
    generation: int
    inode: int
    size: int
    offset: int
    row_nbytes: int


@final
class Undo:
    """The undo file of one data file that is being written. Any thread, one at a time inside.

    Args:
        path: of the undo file.
        fd: the data file.
        rows: how many it has.
        read: ``read(rows, out)`` copies rows as they are in the file, byte for byte.
        offset, row_nbytes: where its rows lie.

    Raises:
        OSError: no room for a file.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        rows: int,
        read: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
        offset: int,
        row_nbytes: int,
    ) -> None:
        self._path, self._read = path, read
        self._data = fd
        self._offset, self._row_nbytes = offset, row_nbytes
        self._saved = np.zeros(rows, np.bool_)  # rows whose value is in the file; the system gives memory as it is touched
        self._end = 0
        self._header: Header | None = None
        self._settled = False  # whether the file begins with _header and nothing of an older generation
        self._lock = threading.Lock()  # guards all of the above and the file: records are appended one at a time
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sync_folder(path.parent)
        before = read_header(path)
        self.last_generation = before.generation if before is not None else 0  # that any header of the file had so far

    @property
    def dirty(self) -> bool:
        """Whether a row was changed since the last commit."""
        return self._end > HEADER_BYTES

    def reset(self, record: str, generation: int) -> None:
        """Begin anew after the commit ``generation``, whose record, ``record``, is durable.

        Raises:
            OSError: the disk failed. The next ``protect`` tries again before it does anything else.
        """
        seen = os.fstat(self._data)
        with self._lock:
            self._header = Header(record, generation, seen.st_ino, seen.st_size, self._offset, self._row_nbytes)
            self._end, self._settled, self.last_generation = HEADER_BYTES, False, generation
            self._saved = np.zeros_like(self._saved)
            self._settle()

    def _settle(self) -> None:
        """Under the lock."""
        if self._settled:
            return
        assert self._header is not None
        if read_header(self._path) != self._header:
            _write(self._fd, [_packed(self._header)], self._header.generation % 2 * _PAGE)
            os.fdatasync(self._fd)  # before the older header is the next to be overwritten
        os.ftruncate(self._fd, HEADER_BYTES)
        self._settled = True

    def protect(self, rows: NDArray[np.int64]) -> None:
        """Make the values of ``rows`` durable that are not yet; distinct rows.

        Raises:
            OSError: the disk is full, or failed; nothing was changed, and the same call may be made again.
        """
        with self._lock:
            self._settle()
            assert self._header is not None
            generation = self._header.generation
            new = np.ascontiguousarray(rows[~self._saved[rows]])
            if not new.size:
                return
            values = np.empty(new.size * self._row_nbytes, np.uint8)
            self._read(new, values)
            head = np.zeros(1, _RECORD)
            head[0] = (_MAGIC, generation, new.size, _sum(generation, new, values))
            try:
                _write(self._fd, [head.tobytes(), new.data, values.data], self._end)
                os.fdatasync(self._fd)
            except OSError as error:
                os.ftruncate(self._fd, self._end)
                error.add_note(f"while the old values of {new.size:,} rows were written to {self._path}")
                raise
            self._end += head.nbytes + new.nbytes + values.nbytes
            self._saved[new] = True

    def close(self) -> None:
        """Give the handle up."""
        os.close(self._fd)


def read_header(path: Path) -> Header | None:
    """The newest header of an undo file; None where there is none yet, and so no record behind it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with path.open("rb") as file:
        pages = file.read(_PAGE), file.read(_PAGE)
    found = []
    for raw in pages:
        text, _, checksum = raw.rstrip(b"\0").rpartition(b"\n")
        if text and checksum == b"%d" % zlib.crc32(text):
            found.append(Header(**json.loads(text)))
    return max(found, key=lambda header: header.generation, default=None)


def records(path: Path, header: Header) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Rows and their old values, of each whole record, in the order they were written."""
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while len(raw := file.read(_RECORD.itemsize)) == _RECORD.itemsize:
            head = np.frombuffer(raw, _RECORD)[0]
            count = int(head["count"])
            left = os.fstat(file.fileno()).st_size - file.tell()
            if head["magic"] != _MAGIC or int(head["generation"]) != header.generation or count > left // 8:
                return
            rows = np.frombuffer(file.read(8 * count), np.int64)
            values = np.frombuffer(file.read(count * header.row_nbytes), np.uint8)
            if values.size != count * header.row_nbytes or int(head["sum"]) != _sum(header.generation, rows, values):
                return
            yield rows, values


def _packed(header: Header) -> bytes:
    text = json.dumps(asdict(header)).encode()
    packed = text + b"\n%d" % zlib.crc32(text)
    if len(packed) > _PAGE:
        raise ValueError(f"the path {header.record} is too long")
    return packed.ljust(_PAGE, b"\0")


def _sum(generation: int, rows: NDArray[np.int64], values: NDArray[np.uint8]) -> int:
    return zlib.crc32(values.data, zlib.crc32(rows.data, generation & 0xFFFFFFFF))


def _write(fd: int, parts: list[Any], place: int) -> None:
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            done = os.pwrite(fd, view, place)
            view, place = view[done:], place + done
