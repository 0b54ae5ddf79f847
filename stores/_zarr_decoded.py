"""Rows of a compressed zarr array: each touched chunk is decoded once a request, or comes from a bounded cache.

Decoding is tensorstore's where it is installed and the array a directory that it can read; else it is zarr's own.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import zarr
from numpy.typing import NDArray

from ._rows import ascending, spans_of
from ._select import Selection
from ._zarr_ranges import missing_chunk
from ._zarr_tensorstore import TensorStoreRows, open_rows
from ._zarr_touched import outer_chunk, read

Decoder = Literal["auto", "tensorstore", "zarr"]
"""What decodes compressed chunks: tensorstore where it is installed and can, else zarr; or the one named."""

DENSE = 0.25  # share of a chunk's rows in a request from which whole chunks are copied into the cache
READ_PIECE_BYTES = 256 << 20  # of decoded chunks that are held at a time on their way into the cache


@final
class DecodedReader:
    """Reads rows of one array, or a part of each. Any thread, several at once.

    Args:
        array: as it is now; the reader is for this shape.
        directory: of it, on the local disk; None elsewhere.
        selection: what to read of each row.
        cache_bytes: of decoded chunks that are kept.
        decoder: see there.
        strict: a file that does not exist is a FileNotFoundError.
        name: what errors call the array.

    Raises:
        ImportError, ValueError: ``decoder`` names tensorstore, and it is not installed or cannot read the array.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        directory: Path | None,
        selection: Selection,
        *,
        cache_bytes: int,
        decoder: Decoder,
        strict: bool,
        name: str,
    ) -> None:
        self._array = array
        self._directory = directory
        self._selection = selection
        self._strict = strict
        self._name = name
        self._chunk_nbytes = max(array.chunks[0] * math.prod(selection.lengths) * array.dtype.itemsize, 1)
        # Of an array that does not fit, tensorstore would keep what is not asked for again, which costs more than it saves.
        nbytes = math.prod(array.shape[:1] + selection.lengths) * array.dtype.itemsize
        pool = cache_bytes // 2 if nbytes <= cache_bytes // 2 else 0
        self._tensorstore: TensorStoreRows | None = None
        if directory is not None and decoder != "zarr":
            self._tensorstore = open_rows(array, directory, selection, pool, must=decoder == "tensorstore")
        elif decoder == "tensorstore":
            raise ValueError(f"{name} is not in a directory, so tensorstore is not used for it; leave decoder='auto'")
        self._cache_bytes = cache_bytes if self._tensorstore is None else cache_bytes // 2
        self._cache = ChunkCache(self._cache_bytes)

    def invalidate(self, places: NDArray[np.int64] | None = None) -> None:
        """Files may have been replaced: those at ``places`` (numbers of shards, or chunks, along the rows), or all."""
        if self._tensorstore is not None:
            self._tensorstore.refresh()
        inside = outer_chunk(self._array)[0] // self._array.chunks[0]
        self._cache.drop(None if places is None else [p * inside + k for p in places.tolist() for k in range(inside)])

    def gather(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        """As of ``RangeReader``."""
        distinct, inverse = ascending(rows)
        found = target if inverse is None else np.empty((distinct.size, *target.shape[1:]), target.dtype)
        if self._tensorstore is not None and self._strict:
            self._require_files(distinct)
        numbers = distinct // self._array.chunks[0]
        if self._is_worth_keeping(numbers):
            self._through_cache(distinct, numbers, found)
        else:
            self._decode(distinct, found)
        if inverse is not None:
            np.take(found, inverse, axis=0, out=target, mode="clip")  # "clip" writes into out without a buffer

    def _decode(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        if self._tensorstore is not None:
            self._tensorstore.read(rows, target)
            return
        decoded = read(self._array, rows, self._selection.key, strict=self._strict)
        decoded = decoded.view(target.dtype) if decoded.dtype.kind == "V" else decoded
        np.copyto(target, decoded, casting="equiv")  # another byte order is all that may differ

    def _is_worth_keeping(self, numbers: NDArray[np.int64]) -> bool:
        """Whether chunks are likely to be asked for again, and to be there still: the request uses a part of them, and
        the cache has room for them. Of a small array tensorstore keeps all by itself."""
        chunk_rows = self._array.chunks[0]
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        counts = np.diff(edges)
        if counts.size * self._chunk_nbytes > self._cache_bytes:
            return False
        whole = int(counts[counts == chunk_rows].sum())
        part = numbers.size / (counts.size * chunk_rows)
        return whole < 0.9 * numbers.size and (self._tensorstore is None or part > DENSE)

    def _through_cache(self, rows: NDArray[np.int64], numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Whole chunks are decoded and kept; what the rows need of them is copied."""
        chunk_rows, total = self._array.chunks[0], self._array.shape[0]
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        ends = np.append(firsts[1:], rows.size)
        wanted = numbers[firsts]
        generation = self._cache.generation  # before anything is read
        held = {number: chunk for number in wanted.tolist() if (chunk := self._cache.get(number)) is not None}
        missing = np.array([number for number in wanted.tolist() if number not in held], np.int64)
        for start, stop in spans_of(missing, max(READ_PIECE_BYTES // self._chunk_nbytes, 1)) if missing.size else ():
            span = missing[start:stop]
            # Whole chunks, the array's last one up to its edge.
            of_chunks = (span[:, None] * chunk_rows + np.arange(chunk_rows)).reshape(-1)
            of_chunks = of_chunks[of_chunks < total]
            decoded = np.empty((of_chunks.size, *out.shape[1:]), out.dtype)
            self._decode(of_chunks, decoded)
            for place, number in enumerate(span.tolist()):
                held[number] = decoded[place * chunk_rows : (place + 1) * chunk_rows].copy()  # not all of the request
                self._cache.put(number, held[number], generation)
        for number, first, end in zip(wanted.tolist(), firsts.tolist(), ends.tolist(), strict=True):
            np.take(held[number], rows[first:end] - number * chunk_rows, axis=0, out=out[first:end], mode="clip")

    def _require_files(self, rows: NDArray[np.int64]) -> None:
        """tensorstore's own error would not name the chunk."""
        outer = outer_chunk(self._array)
        metadata: Any = self._array.metadata
        assert self._directory is not None
        along = sorted({piece.chunk for piece in self._selection.pieces(outer[1:])})
        for place in np.unique(rows // outer[0]).tolist():
            for rest in along:
                key = metadata.encode_chunk_key((place, *rest))
                if not os.path.exists(self._directory / key):
                    raise missing_chunk(f"{self._array.path}/{key}".lstrip("/"), self._name)


@final
class ChunkCache:
    """Decoded chunks by number, the least recently used given up first. Any thread.

    Attributes:
        nbytes: of what is held, at most ``most``.
        generation: of the files; each ``drop`` begins another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards all below
        self._chunks: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self.nbytes = 0
        self.generation = 0

    def get(self, number: int) -> NDArray[Any] | None:
        """A chunk, not to be changed; None when it is not held."""
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is not None:
                self._chunks.move_to_end(number)
            return chunk

    def put(self, number: int, chunk: NDArray[Any], generation: int) -> None:
        """Keep a chunk, at the cost of others; not one that was read in an earlier generation."""
        with self._lock:
            if generation != self.generation:
                return
            self._remove(number)
            self._chunks[number] = chunk
            self.nbytes += chunk.nbytes
            while self.nbytes > self._most:
                self._remove(next(iter(self._chunks)))

    def drop(self, numbers: list[int] | None) -> None:
        """Forget these, or all."""
        with self._lock:
            self.generation += 1
            for number in list(self._chunks) if numbers is None else numbers:
                self._remove(number)

    def _remove(self, number: int) -> None:
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self.nbytes -= chunk.nbytes
