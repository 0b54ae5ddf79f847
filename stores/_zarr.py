"""Rows of a zarr array: v2 or v3, chunked, sharded or zipped, on disk or behind any zarr store.

Guarantees, beyond the contract's:
- Rows of uncompressed chunks and shards are read by their byte ranges: nothing else is read, nothing decoded.
- Compressed chunks that a request touches are decoded once, whatever the order and repeats of its rows, outside the GIL.
- A scatter reads each touched chunk (shard, when sharded), changes the rows and replaces it; no two scatters of one
  store do that at once, and a second store for writing on the same directory is refused.
- On disk, zarr (from 3.1.3) replaces a chunk by renaming a whole new file over it: a reader, and a process that is
  killed, leaves or sees a whole chunk, old or new. A shard is read in several pieces, so this store's own readers
  wait while one of its shards is replaced; readers elsewhere must not read a sharded array that is being written.

- What is remembered of files (mappings, shard indices, decoded chunks) is forgotten when a store of rowferry writes
  them, in this process or another.

Assumes:
- Nobody else writes the chunks that this store writes. Other programs do not change chunks that exist while a store is
  open that read them: it may go on to see the old ones.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final, get_args

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from . import _zarr_open
from ._contract import Store
from ._files import Mode
from ._rows import is_ascending
from ._select import refuse_to_write, selection_of
from ._zarr_decoded import Decoder
from ._zarr_disk import ChunkSpace, sync_file_system
from ._zarr_lock import LOCK_NAME, DirectoryLock, ReadersWriter
from ._zarr_reading import Reading, Wanted
from ._zarr_source import Source
from ._zarr_touched import outer_chunk, write

CACHE_BYTES = 256 << 20
_writes: Counter[Hashable] = Counter()  # scatters by ``identity``, where no file tells of them


@final
class ZarrStore(Store):
    """Rows of a zarr array, read and written through zarr.

    ``chunk_rows`` is the rows of what is replaced together where the store is writable (a shard, else a chunk), else the
    rows of a chunk that is decoded, or 1 where chunks are not compressed. ``block_rows`` is the rows of a chunk.

    Args:
        source: path of a directory or ``.zip``, a URL (to read only; its shape stays what it was at the opening), or an
            open ``zarr.Array`` (its store is used, and stays open).
        mode: ``"r"``, or ``"r+"`` to write. ``"r+"`` locks a directory against other writers (``BlockingIOError``
            names their process) and, where chunks are not compressed, reserves the disk space of chunks that do not
            exist yet (``OSError`` when the disk is too full). Both are one hidden file that ``close`` removes.
        array: name of an array inside a group, such as ``"layers/weight"``.
        dtype: for elements that zarr has no type for: what integers or raw bits of its size are, such as
            ``torch.bfloat16``. No cast.
        select: a part of each row, to read only: an index of one row, as NumPy's basic indexing takes it, of ints, slices
            with positive steps and ``...``. ``np.s_[:, 0:64]`` of rows ``(3, 128)`` makes rows ``(3, 64)``; an int
            removes its dimension. Chunks outside of it are not read.
        cache_bytes: most bytes of decoded chunks that are kept from request to request; 0 keeps none. Without
            tensorstore, chunks of a request that would fill more than half of it are not kept.
        decoder: what decodes compressed chunks: ``"tensorstore"``, ``"zarr"``, or ``"auto"`` for tensorstore where it is
            installed and can read a local directory, else zarr.
        strict: a chunk that does not exist is a ``FileNotFoundError`` that names it, instead of fill values
            (zeros where the array has no fill value). Chunks left out inside a shard always read as fill values.
        storage_options: of a URL; see ``RemoteStore``.

    Raises:
        FileNotFoundError: no such path. TypeError: elements that no torch dtype has.
        ValueError: no zarr, no such array, a group without ``array``, rank 0.
        PermissionError: ``"r+"`` of a zip or of a read-only zarr store. IndexError: ``select`` does not fit a row.

    Threads: ``gather`` in any number; zarr decodes in its own threads. In a forked child every call is a RuntimeError.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | zarr.Array[Any],
        mode: Mode = "r",
        *,
        array: str | None = None,
        dtype: torch.dtype | None = None,
        select: Any = None,
        cache_bytes: int = CACHE_BYTES,
        decoder: Decoder = "auto",
        strict: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"mode is {mode!r}; it must be 'r' (read) or 'r+' (read and write)")
        if decoder not in get_args(Decoder):
            raise ValueError(f"decoder is {decoder!r}; it must be one of {', '.join(map(repr, get_args(Decoder)))}")
        refuse_to_write(select, mode)
        self._source = Source(source, mode, array, storage_options)
        try:
            self._set_up(mode, dtype, select, cache_bytes, decoder, strict)
        except BaseException:
            self._source.close()
            raise

    def _set_up(
        self, mode: Mode, dtype: torch.dtype | None, select: Any, cache_bytes: int, decoder: Decoder, strict: bool
    ) -> None:
        self._array = opened = self._source.array
        self._pid = os.getpid()
        self._directory = self._source.directory
        self.name, self.remote = self._source.name, self._source.objects is not None
        self.dtype, self._host_dtype = _zarr_open.element_types(opened, dtype, self.name)
        if not opened.shape:
            raise ValueError(f"{self.name} has rank 0; a store needs at least one dimension, its rows")
        rows, *row_shape = (int(n) for n in opened.shape)
        selection = selection_of(select, tuple(row_shape), self.name)
        self.shape = (rows, *selection.shape)
        self.writable = mode == "r+"
        self._wanted = Wanted(selection, cache_bytes, decoder, strict, self.name, self._source.objects)
        self._reading = Reading(opened, self._wanted)
        self.block_rows = int(opened.chunks[0]) or 1
        outer_rows = int(outer_chunk(opened)[0]) or 1
        self.chunk_rows = outer_rows if self.writable else 1 if self._reading.by_ranges else self.block_rows
        self._stamp, self._writers = self._metadata_stamp(), self._writers_stamp()
        self._exclusive = ReadersWriter()
        self._space: ChunkSpace | None = None
        root = self._source.root
        if self.writable and root is not None:
            lock = DirectoryLock(root / opened.path)
            # A store that is dropped without close() must not stay locked for this process's life.
            self._unlock: Any = weakref.finalize(self, lock.close)
            try:
                self._space = ChunkSpace(opened, root, lock)
            except BaseException:
                self._unlock()
                raise

    # ---- the contract ----------------------------------------------------------------------------------------

    @property
    def identity(self) -> Hashable:
        return self._source.identity

    def any_order(self) -> bool:
        return self._reading.any_order

    def from_disk(self) -> bool:
        return self._reading.from_disk

    def expect(self, rows: NDArray[np.int64]) -> None:
        if rows.size:
            self._reading.expect(rows)

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._require_same_process()
        if not out.numel():
            return
        with self._alone():
            self._current(int(rows.max()))
            self._call(rows, self._reading.gather, rows, self._as_host(out))

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        self._require_same_process()
        if not values.numel():
            return
        host = self._as_host(values)
        order = None if is_ascending(rows) else np.argsort(rows)
        if order is not None:
            rows, host = rows[order], host[order]
        with self._exclusive.writing():
            array = self._current(int(rows[-1]))
            stored = array.dtype
            host = host.view(stored) if stored.kind == "V" else host.astype(stored, copy=False)
            try:
                self._call(rows, write, array, rows, host, before_set=self._space.before_set if self._space else None)
            finally:
                self._reading.invalidate(np.unique(rows // outer_chunk(array)[0]))
                if self._directory is None:
                    _writes[self.identity] += 1

    def _flush(self, sync: bool) -> None:
        """A scatter returns when its chunks are files (or in the store), so only ``sync`` has work to do."""
        self._require_same_process()
        if sync and self._directory is not None:
            sync_file_system(self._directory)

    def _close(self) -> None:
        if self._space is not None:
            self._unlock()
        self._reading.close()
        self._source.close()

    def describe(self) -> dict[str, Any]:
        """Metadata for people, as plain values that JSON can hold.

        Keys: ``dimension_names`` (list or None), ``units``, ``scale_factor``, ``add_offset`` (attributes of the array,
        or None), ``chunks``, ``shards`` (lists; None when not sharded), ``compressor`` (names, in order),
        ``zarr_format`` (2 or 3).
        """
        self._require_open()
        return _zarr_open.describe(self._array)

    @property
    def attributes(self) -> dict[str, Any]:
        """The array's own attributes, a copy."""
        self._require_open()
        return dict(self._array.attrs)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _alone(self) -> AbstractContextManager[None]:
        alone = self.writable and self._array.shards is not None  # see the module: a shard is read in several pieces
        return self._exclusive.reading() if alone else nullcontext()

    def _require_same_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.name} was opened in process {self._pid} and is used in its forked child {os.getpid()}, where zarr's "
                f"threads do not exist; start workers with 'spawn', or open the store in the child"
            )

    def _call(self, rows: NDArray[np.int64], function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            self._source.told(lambda: function(*args, **kwargs))
        except Exception as error:
            error.add_note(f"in {self.name}, {rows.size} rows from {rows.min()} to {rows.max()}")
            raise

    def _as_host(self, tensor: torch.Tensor) -> NDArray[Any]:
        """``tensor``'s memory as an array of ``_host_dtype``; NumPy has no bfloat16, so by bytes."""
        return tensor.reshape(-1).view(torch.uint8).numpy().view(self._host_dtype).reshape(tensor.shape)

    def _metadata_stamp(self) -> tuple[int, ...] | None:
        """Changes when the array's metadata file is replaced; None where there is no file to look at."""
        if self._directory is None:
            return None
        try:
            seen = os.stat(self._directory / ("zarr.json" if self._array.metadata.zarr_format == 3 else ".zarray"))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name} was removed since it was opened") from error
        return seen.st_mtime_ns, seen.st_ino, seen.st_size

    def _writers_stamp(self) -> tuple[bool, int]:
        """Whether another store of rowferry may be writing a directory now; and what changes when one comes or goes, or
        (where there is no directory) when one of this process has written."""
        if self.writable:
            return False, 0
        if self._directory is None:
            return False, _writes[self.identity]
        return os.path.exists(self._directory / LOCK_NAME), os.stat(self._directory).st_mtime_ns

    def _current(self, last: int) -> zarr.Array[Any]:
        """The array as it is now. Another handle may have resized it: its old shape would read fill values for rows
        that are gone, and drop appended rows of an edge chunk when writing it.

        A stat on disk; other stores than zips and URLs are asked for their metadata, one small read a request.
        """
        array, stamp = self._array, self._metadata_stamp()
        if stamp != self._stamp or self._source.may_be_resized:
            now = _zarr_open.open_array(array.store, array.path, "r+" if self.writable else "r")
            if (now.shape[1:], now.dtype, outer_chunk(now)) != (array.shape[1:], array.dtype, outer_chunk(array)):
                raise ValueError(f"{self.name} was replaced by an array of another layout since it was opened; open it again")
            if now.shape != array.shape:
                self._reading = Reading(now, self._wanted)
            self._array, self._stamp, array = now, stamp, now
        writers = self._writers_stamp()
        if writers[0] or writers != self._writers:
            self._reading.invalidate()
            self._writers = writers
        if last >= array.shape[0]:
            raise IndexError(
                f"row {last} of {self.name} is gone: it had {len(self)} rows when it was opened, "
                f"and was resized to {array.shape[0]} since"
            )
        return array
