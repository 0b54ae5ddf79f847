"""Rows of an uncompressed zarr array behind a URL, by their byte ranges: a request's parts of rows are fetched together.

What the layout says of files on a disk holds for objects. Shard indices are fetched once, and kept while there is room.
"""

from __future__ import annotations

import errno
import math
from collections import OrderedDict
from typing import Any, NamedTuple, final

import numpy as np
import zarr
from numpy.typing import NDArray

from ._byte_ranges import Records
from ._remote import Head, RemoteObjects
from ._rows import ascending, distinct_places, pieces
from ._select import Selection
from ._zarr_files import MOST_INDEX_BYTES
from ._zarr_layout import RawLayout, chunk_places
from ._zarr_ranges import Part, extent_of, keys_of, missing_chunk, parts_of

FETCH_BYTES = 64 << 20  # of parts of rows that are held at a time before what was selected of them is copied


class _Fetch(NamedTuple):
    """One part of some rows: what is fetched, and where it goes afterwards."""

    records: Records
    files: NDArray[np.int64]  # of each record
    at: NDArray[np.int64]  # of each record, its row in the output
    target: Any  # in a row of the output: a Box
    found: NDArray[Any] | None  # the records as elements to copy; None where they are in the output already


@final
class ObjectReader:
    """Reads rows of one array, or a part of each. Any thread, several at once.

    Args:
        array: as it is now.
        layout: of it; a row's elements in one chunk lie together.
        objects: those of the whole store.
        selection: what to read of each row.
        strict: an object that does not exist is a FileNotFoundError.
        name: what errors call the array.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        layout: RawLayout,
        objects: RemoteObjects,
        selection: Selection,
        *,
        strict: bool,
        name: str,
    ) -> None:
        self._layout, self._objects, self._strict, self._name = layout, objects, strict, name
        self._key_of = keys_of(array, layout)
        self._columns = math.prod(layout.file_grid)
        self._parts = parts_of(layout, selection)
        self._lengths = selection.lengths
        self._fetched = sum(
            last - first for parts in self._parts.values() for first, last in (extent_of(layout, part.inside) for part in parts)
        )
        self._indices = _Indices(layout)

    def invalidate(self, places: NDArray[np.int64] | None = None) -> None:
        """Objects may have been replaced."""
        self._indices = _Indices(self._layout)

    def gather(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        """As of ``RangeReader``."""
        distinct, inverse = ascending(rows)
        found = target if inverse is None else np.empty((distinct.size, *target.shape[1:]), target.dtype)
        whole = found.reshape(distinct.size, *self._lengths)
        for start, stop in pieces(distinct.size, self._fetched, FETCH_BYTES):
            self._gather(distinct[start:stop], whole[start:stop])
        if inverse is not None:
            np.take(found, inverse, axis=0, out=target, mode="clip")

    def _gather(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        places, which = distinct_places(rows // self._layout.outer[0])
        files = (places[:, None] * self._columns + np.array(list(self._parts))).reshape(-1)  # a column each
        begins = self._chunks(files).reshape(places.size, len(self._parts), -1)
        fetches = [
            self._fetch(rows, part, begins[:, column], which, which * len(self._parts) + column, out)
            for column, parts in enumerate(self._parts.values())
            for part in parts
        ]
        there = self._objects.read([self._key_of(file) for file in files.tolist()], [each.records for each in fetches])
        for fetch, exists in zip(fetches, there, strict=True):
            if self._strict and not exists.all():
                raise missing_chunk(self._key_of(int(files[fetch.files[~exists][0]])), self._name)
            if fetch.found is not None:
                out[(fetch.at, *fetch.target)] = fetch.found
            elif not self._layout.stored.isnative:
                np.copyto(out, out.view(self._layout.stored))
            if not exists.all():
                out[(fetch.at[~exists], *fetch.target)] = self._layout.fill

    def _fetch(
        self,
        rows: NDArray[np.int64],
        part: Part,
        begins: NDArray[np.int64],
        which: NDArray[np.int64],
        files: NDArray[np.int64],
        out: NDArray[Any],
    ) -> _Fetch:
        """What to fetch of one part of ``rows``; those whose chunk a shard does not have are filled."""
        layout = self._layout
        first, last = extent_of(layout, part.inside)
        chunk = rows % layout.outer[0] // layout.chunk[0] * math.prod(layout.inner_grid[1:]) + part.chunk
        starts = begins[which, chunk]
        at = np.flatnonzero(starts >= 0)
        if at.size < rows.size:
            absent: Any = (starts < 0, *part.target)
            out[absent] = layout.fill
        row_nbytes = layout.chunk_nbytes // layout.chunk[0]
        starts = starts[at] + rows[at] % layout.chunk[0] * row_nbytes + first
        files = files[at]
        order = np.lexsort((starts, files))  # a shard may have its chunks in any order
        at, starts, files = at[order], starts[order], files[order]
        lengths = tuple(len(range(each.start, each.stop, each.step)) for each in part.inside)
        straight = lengths == self._lengths and all(each.step == 1 for each in part.inside)
        if straight and last - first == math.prod(lengths) * layout.stored.itemsize and np.array_equal(at, np.arange(len(out))):
            return _Fetch(Records(files, starts, out.view(np.uint8).reshape(len(out), -1)), files, at, part.target, None)
        data = np.empty((at.size, last - first), np.uint8)
        steps, size = [], layout.stored.itemsize
        for n, each in zip(reversed(layout.chunk[1:]), reversed(part.inside), strict=True):
            steps.append(size * each.step)
            size *= n
        found: NDArray[Any] = np.ndarray((at.size, *lengths), layout.stored, data, strides=(last - first, *reversed(steps)))
        return _Fetch(Records(files, starts, data), files, at, part.target, found)

    def _chunks(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(len(files), chunks in a file)``: where each chunk starts in its object, -1 if it is not there."""
        index = self._layout.index
        if index is None:
            return np.zeros((files.size, 1), np.int64)
        indices = self._indices
        known = {file: found for file in files.tolist() if (found := indices.get(file)) is not None}
        missing = [file for file in files.tolist() if file not in known]
        keys = [self._key_of(file) for file in missing]
        for file, key, head in zip(missing, keys, self._objects.ends(keys, index.nbytes, at_start=index.at_start), strict=True):
            if head is None and self._strict:
                raise missing_chunk(key, self._name)
            known[file] = self._checked(head, key)
            if head is not None:  # that an object does not exist is never remembered
                indices.put(file, known[file])
        return np.stack([known[file] for file in files.tolist()])

    def _checked(self, head: Head | None, key: str) -> NDArray[np.int64]:
        index = self._layout.index
        assert index is not None
        if head is None:
            return np.full(index.chunks, -1, np.int64)
        name = f"chunk {key!r} of {self._name}"
        if len(head.data) != index.nbytes:
            raise OSError(errno.EIO, f"{name} has {head.size:,} bytes, and its index alone {index.nbytes:,}; it was cut off")
        try:
            return chunk_places(index, np.frombuffer(head.data, np.uint8), head.size, self._layout.chunk_nbytes, name)
        except ValueError as error:
            raise OSError(errno.EIO, str(error)) from error


@final
class _Indices:
    """Shard indices by file, the oldest given up first. Any thread: each step is one operation of a dictionary."""

    def __init__(self, layout: RawLayout) -> None:
        self._most = max(MOST_INDEX_BYTES // (8 * layout.index.chunks), 1) if layout.index is not None else 0
        self._found: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def get(self, file: int) -> NDArray[np.int64] | None:
        return self._found.get(file)

    def put(self, file: int, places: NDArray[np.int64]) -> None:
        self._found[file] = places
        while len(self._found) > self._most:
            self._found.popitem(last=False)
