"""The chunks that a request touches, as a small array of their own; one zarr call reads or writes them all.

zarr plans a selection in memory and time proportional to the chunk grid of the whole array. Seen through this
file the array consists of nothing but the touched chunks, pushed together along the row axis, so a request costs
what it touches, and rows that fill their chunks become one plain slice.

Guarantees:
- A request is one zarr call to read; to write one, or two for each 32 MiB (or four chunks, when larger) of decoded chunks.
- Each touched chunk (shard, when sharded) is fetched once and, when written, replaced once.
- After ``write`` no write of that request is under way any more, also when it raised.

Assumes:
- Rows are ascending, distinct and inside the array.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast, final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import StorePath

from ._rows import contiguous, spans_of

WRITE_PIECE_BYTES = 32 << 20  # a scatter holds at most this much of decoded chunks, or so many chunks as follow
WRITE_PIECE_CHUNKS = 4  # large ones are replaced side by side, too

# The chunk's place on the row axis: the first number of a key, after "c/" or "c." in the format's own encoding.
_KEY = re.compile(r"(c[/.])?(\d+)(.*)", re.DOTALL)


def outer_chunk(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Shape of what is stored under one key: the shard if sharded, else the chunk."""
    return tuple(array.shards or array.chunks)


def read(array: zarr.Array[Any], rows: NDArray[np.int64], part: tuple[int | slice, ...], *, strict: bool) -> NDArray[Any]:
    """``rows`` of ``array``, ``part`` of each, in its own dtype, C order: a fresh array ``(len(rows), *row[part].shape)``.

    Raises:
        FileNotFoundError: ``strict`` and a touched chunk does not exist.
    """
    chunks = TouchedChunks(array, rows, strict=strict)
    return np.asarray(chunks.view.oindex[(chunks.selection, *part)])


def write(
    array: zarr.Array[Any], rows: NDArray[np.int64], values: NDArray[Any], *, before_set: Callable[[str], None] | None
) -> None:
    """Replace ``rows`` by ``values``; the other rows of the touched chunks are read first and kept.

    Args:
        array: opened for writing.
        rows: see the module.
        values: ``(len(rows), *row_shape)``, of the array's dtype.
        before_set: called with a chunk's key before the chunk is replaced, in zarr's own thread.
    """
    chunk_nbytes = outer_chunk(array)[0] * values[0].nbytes
    for start, stop in spans_of(rows // outer_chunk(array)[0], max(WRITE_PIECE_BYTES // chunk_nbytes, WRITE_PIECE_CHUNKS)):
        chunks = TouchedChunks(array, rows[start:stop], before_set=before_set)
        try:
            chunks.replace(values[start:stop])
        finally:
            chunks.settle()


@final
class TouchedChunks(Store):
    """A store that answers for chunk ``k`` of the small array with the ``k``-th touched chunk of the large one.

    Built on zarr's abstract store and not on its wrapper: a method that a later zarr adds, such as the many ranges of
    a shard at once, then comes to ``get`` and is translated, where the wrapper would hand it on with the wrong key.

    Attributes:
        view: the small array.
        selection: where the rows are in it: a slice if they are one range, else an index array.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        rows: NDArray[np.int64],
        *,
        strict: bool = False,
        before_set: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(read_only=array.read_only)
        self._store = array.store
        chunk_rows = outer_chunk(array)[0]
        ids = rows // chunk_rows
        first = np.concatenate(([True], ids[1:] != ids[:-1]))
        self._touched = ids[first]
        places = (np.cumsum(first) - 1) * chunk_rows + rows % chunk_rows
        # The last touched chunk may be the array's edge, and must stay an edge.
        edge = min(chunk_rows, array.shape[0] - int(self._touched[-1]) * chunk_rows)
        length = (self._touched.size - 1) * chunk_rows + edge
        self.selection: slice | NDArray[np.int64] = slice(int(places[0]), int(places[-1]) + 1) if contiguous(places) else places
        self._prefix = f"{array.path}/" if array.path else ""
        self._strict = strict
        self._before_set = before_set
        self._quiet = threading.Condition()  # guards the two below; notified when the last write under way has ended
        self._writing = 0
        self._over = False  # True: the request has ended, so a write that zarr still has in line is refused
        metadata = cast("Any", dataclasses.replace)(array.metadata, shape=(length, *array.shape[1:]))
        # C order: what comes back is contiguous. Chunks that equal the fill value are written like all others:
        # comparing costs a pass over the data, and a deleted chunk would look like a lost one.
        config: Any = {"order": "C", "write_empty_chunks": True}
        self.view: zarr.Array[Any] = zarr.Array(zarr.AsyncArray(metadata, StorePath(self, array.path), config))

    def replace(self, values: NDArray[Any]) -> None:
        """Put ``values`` in the place of the rows."""
        if isinstance(self.selection, slice) and len(values) == self.view.shape[0]:
            self.view[:] = values  # whole chunks: nothing to read first
            return
        # Not one assignment to the rows: in a sharded array whose shard is also split along a row, zarr (3.1) fails at
        # it, and chunks of a new shard that the rows do not touch would be left out, so that it grows at a later write.
        block = np.require(self.view[:], requirements="W")
        block[self.selection] = values
        self.view[:] = block

    def settle(self) -> None:
        """Return when no write is under way; refuse later ones.

        zarr raises at the first failure and leaves the request's other chunks to finish behind its back. One of
        them could otherwise land after a retry and undo it.
        """
        with self._quiet:
            self._over = True
            self._quiet.wait_for(lambda: self._writing == 0)

    def _real(self, key: str) -> str:
        """The large array's key for a chunk key of the small one."""
        match = _KEY.fullmatch(key.removeprefix(self._prefix))
        if match is None:
            raise ValueError(f"{key!r} is no chunk of {self._prefix or 'the array'}; this chunk key encoding is not supported")
        head, place, tail = match.groups()
        return f"{self._prefix}{head or ''}{self._touched[int(place)]}{tail}"

    # ---- what zarr calls, in its event loop ------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        real = self._real(key)
        found = await self._store.get(real, prototype, byte_range)
        if found is None and self._strict:
            raise FileNotFoundError(
                f"chunk {real!r} of {self._store} is missing; without strict=True it reads as the fill value"
            )
        return found

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return await self._store.exists(self._real(key))

    async def set(self, key: str, value: Buffer) -> None:
        real = self._real(key)
        with self._quiet:
            if self._over:
                raise RuntimeError(f"the write of chunk {real!r} was given up with its request")
            self._writing += 1
        try:
            if self._before_set is not None:
                self._before_set(real)
            await self._store.set(real, value)
        finally:
            with self._quiet:
                self._writing -= 1
                if not self._writing:
                    self._quiet.notify_all()

    async def delete(self, key: str) -> None:
        await self._store.delete(self._real(key))

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("the touched chunks of one request are known, not listed")

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        return self.list_prefix(prefix)

    @property
    def supports_writes(self) -> bool:
        return True

    @property
    def supports_deletes(self) -> bool:
        return True

    @property
    def supports_listing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Store.__hash__
