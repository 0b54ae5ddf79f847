"""The disk under a zarr directory: space kept for chunks that do not exist yet, and fsync of what was written."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any, final

import zarr

from ._zarr_lock import DirectoryLock
from ._zarr_open import is_raw
from ._zarr_touched import outer_chunk

_INDEX_BYTES = 16  # a shard's index: offset and length, 8 bytes each, for each of its chunks; and a checksum of 4


@final
class ChunkSpace:
    """The space of an uncompressed array's chunks: reserved in ``lock``'s file, given back one by one as they are written.

    Compressed chunks have no size before they are written, so nothing is reserved for them.

    Args:
        array: opened for writing, on the local disk.
        root: directory of its zarr store; chunk keys are paths under it.
        lock: of the array's directory.

    Raises:
        OSError: the disk is too full for the chunks that do not exist yet, or for the second copies of those that
            zarr replaces at once.
    """

    def __init__(self, array: zarr.Array[Any], root: Path, lock: DirectoryLock) -> None:
        self._root = root
        self._lock = lock
        self._nbytes = chunk_nbytes(array)
        if not self._nbytes:
            return
        total = math.prod(-(-n // m) for n, m in zip(array.shape, outer_chunk(array), strict=True))
        missing = max(total - _count_chunks(root / array.path), 0)
        at_once = min(int(zarr.config.get("async.concurrency", 10)), total)
        lock.reserve(missing * self._nbytes, at_once * self._nbytes)

    def before_set(self, key: str) -> None:
        """Called before the chunk ``key`` is written, by one thread: a new one takes its reserved space."""
        if self._nbytes and not os.path.exists(self._root / key):
            self._lock.release(self._nbytes)


def chunk_nbytes(array: zarr.Array[Any]) -> int:
    """Bytes of each chunk file (shard, when sharded) of ``array``; 0 where they depend on the values or there are none."""
    if not is_raw(array) or not math.prod(array.shape):
        return 0
    outer = outer_chunk(array)
    index = _INDEX_BYTES * math.prod(outer) // math.prod(array.chunks) + 4 if array.shards else 0
    return math.prod(outer) * int(array.dtype.itemsize) + index


def sync_file_system(directory: Path) -> None:
    """Return when all that was written to the directory's file system is durable, as far as it promises for sync.

    One call, where fsync would need each chunk file and its folder.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:  # not Linux
        os.sync()
        return
    fd = os.open(directory, os.O_RDONLY)
    try:
        if syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(directory))
    finally:
        os.close(fd)


def _count_chunks(directory: Path) -> int:
    """Files under ``directory`` that are neither metadata, nor hidden, nor left by an interrupted write."""
    count = 0
    for _folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        count += sum(not (name.startswith(".") or name == "zarr.json" or name.endswith(".partial")) for name in names)
    return count
