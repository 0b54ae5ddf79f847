"""How the rows of a zarr array are read: by byte ranges where nothing is compressed, else decoded; and anew when it changed."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import LocalStore, ZipStore

from ._remote import RemoteObjects
from ._select import Selection
from ._zarr_decoded import DecodedReader, Decoder
from ._zarr_files import Folder, Medium, Unmappable, Zip
from ._zarr_layout import RawLayout, raw_layout
from ._zarr_objects import ObjectReader
from ._zarr_ranges import RangeReader
from ._zarr_touched import outer_chunk

_log = logging.getLogger("rowferry")


@final
@dataclass(frozen=True)
class Wanted:
    """How a store wants its rows: the part of each, and as ``ZarrStore`` explains them."""

    selection: Selection
    cache_bytes: int
    decoder: Decoder
    strict: bool
    name: str
    objects: RemoteObjects | None


@final
@dataclass(frozen=True)
class _Closed:
    """What reads once nothing is read any more."""

    name: str

    def gather(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        raise ValueError(f"{self.name} was closed")

    def invalidate(self, places: NDArray[np.int64] | None = None) -> None:
        """Nothing is remembered."""


@final
class Reading:
    """Reads rows of one array; made anew when the array is resized. Any thread, several at once.

    Attributes:
        by_ranges: rows are read without decoding chunks.
    """

    def __init__(self, array: zarr.Array[Any], wanted: Wanted) -> None:
        self._array, self._wanted = array, wanted
        self._reader: RangeReader | ObjectReader | DecodedReader | _Closed
        ranges = self._ranges() if math.prod(array.shape) else None
        self.by_ranges = ranges is not None
        self._reader = ranges if ranges is not None else self._decoded()

    @property
    def any_order(self) -> bool:
        """Whether rows in any order are read as fast as ascending ones."""
        return isinstance(self._reader, RangeReader) and self._reader.whole

    @property
    def from_disk(self) -> bool:
        """As ``Store.from_disk``; of rows that are decoded nothing is known."""
        return isinstance(self._reader, RangeReader) and self._reader.from_disk

    def gather(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        """See ``RangeReader.gather``."""
        try:
            self._reader.gather(rows, target)
        except Unmappable as error:
            _log.info("%s is read chunk by chunk: %s", self._wanted.name, error)
            self._reader, self.by_ranges = self._decoded(), False
            self._reader.gather(rows, target)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """See ``Store.expect``."""
        reader = self._reader
        if isinstance(reader, RangeReader):
            reader.expect(rows)

    def invalidate(self, places: NDArray[np.int64] | None = None) -> None:
        """Files may have been replaced: those at ``places`` (numbers of shards, or chunks, along the rows), or all."""
        self._reader.invalidate(places)

    def close(self) -> None:
        """Give up mapped files and decoded chunks as soon as calls under way have ended, not when a collector finds the
        store: mapped pages cannot leave the page cache, and address space is not endless. Later calls are a ValueError."""
        self._reader = _Closed(self._wanted.name)

    def _ranges(self) -> RangeReader | ObjectReader | None:
        layout, wanted = raw_layout(self._array), self._wanted
        if layout is None:
            return None
        if wanted.objects is not None:
            if not layout.rows_first:
                return None  # a row is all over its chunk, which is fetched whole
            objects, selection = wanted.objects, wanted.selection
            return ObjectReader(self._array, layout, objects, selection, strict=wanted.strict, name=wanted.name)
        medium = _medium(self._array, layout)
        if medium is None:
            return None
        return RangeReader(self._array, layout, medium, wanted.selection, strict=wanted.strict, name=wanted.name)

    def _decoded(self) -> DecodedReader:
        array, wanted = self._array, self._wanted
        directory = Path(array.store.root) / array.path if isinstance(array.store, LocalStore) else None
        return DecodedReader(
            array,
            directory,
            wanted.selection,
            cache_bytes=wanted.cache_bytes,
            decoder=wanted.decoder,
            strict=wanted.strict,
            name=wanted.name,
        )


def _medium(array: zarr.Array[Any], layout: RawLayout) -> Medium | None:
    """Where the files are, if they can be mapped."""
    store: Any = array.store
    most = -(-array.shape[0] // outer_chunk(array)[0]) * math.prod(layout.file_grid)
    if isinstance(store, ZipStore):
        return Zip(Path(store.path), most)
    if not isinstance(store, LocalStore):
        return None
    nbytes = layout.chunk_nbytes if layout.index is None else layout.index.chunks * layout.chunk_nbytes + layout.index.nbytes
    row_nbytes = math.prod(layout.shape[1:]) * layout.stored.itemsize if layout.plain else 1
    return Folder(Path(store.root), nbytes, row_nbytes, most)
