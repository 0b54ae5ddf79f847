"""Where the bytes of an uncompressed array's rows are: told from its metadata, without reading a chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, TransposeCodec

_ENTRY = 16  # a shard's index has for each chunk its offset and length, 8 bytes each
_CHECKSUM = 4


@final
@dataclass(frozen=True)
class ShardIndex:
    """How a shard tells where its chunks are.

    Attributes:
        chunks: in a shard, in C order of their grid.
        at_start: the index is the shard's first bytes, else its last.
        checked: it ends with its own crc32c.
    """

    chunks: int
    at_start: bool
    checked: bool

    @property
    def nbytes(self) -> int:
        return self.chunks * _ENTRY + (_CHECKSUM if self.checked else 0)


@final
@dataclass(frozen=True)
class RawLayout:
    """An array whose elements are on disk as they are: any of them can be read without decoding the others.

    Attributes:
        shape, chunk, outer: of the array, a chunk, and what is one file (the shard, or the chunk). As zarr has them.
        stored: NumPy dtype of an element, in the byte order on disk; bits of types that NumPy lacks are integers.
        axes: a chunk on disk is ``chunk.transpose(axes)`` in C order.
        fill: value of chunks that do not exist, 0-d, native.
        index: of a shard; None when not sharded.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    outer: tuple[int, ...]
    stored: np.dtype[Any]
    axes: tuple[int, ...]
    fill: NDArray[Any]
    index: ShardIndex | None

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, edge chunks too."""
        return math.prod(self.chunk) * self.stored.itemsize

    @property
    def rows_first(self) -> bool:
        """A row's elements in one chunk lie together."""
        return self.axes == tuple(range(len(self.axes)))

    @property
    def file_grid(self) -> tuple[int, ...]:
        """Files along each dimension of a row."""
        return tuple(-(-n // m) for n, m in zip(self.shape[1:], self.outer[1:], strict=True))

    @property
    def inner_grid(self) -> tuple[int, ...]:
        """Chunks of a file along each dimension, rows first."""
        return tuple(n // m for n, m in zip(self.outer, self.chunk, strict=True))

    @property
    def plain(self) -> bool:
        """A whole row is one run of bytes, as memory has it."""
        whole = self.chunk[1:] == self.shape[1:] == self.outer[1:]
        return whole and self.rows_first and self.stored.isnative


def raw_layout(array: zarr.Array[Any]) -> RawLayout | None:
    """The layout, or None when chunks must be decoded (compressed, filtered, checked by a sum of their own, packed bits)."""
    metadata: Any = array.metadata
    found = _of_v2(array) if metadata.zarr_format == 2 else _of_v3(array, tuple(metadata.codecs))
    if found is None:
        return None
    byte_order, axes, index = found
    native = array.dtype.newbyteorder("=")
    if native.kind == "V":
        native = np.dtype(f"u{native.itemsize}")
    fill = np.zeros((), array.dtype) if metadata.fill_value is None else np.asarray(metadata.fill_value, array.dtype)
    if fill.dtype.kind != "V":
        fill = fill.astype(native)
    return RawLayout(
        shape=tuple(array.shape),
        chunk=tuple(array.chunks),
        outer=tuple(array.shards or array.chunks),
        stored=native.newbyteorder(byte_order),
        axes=axes,
        fill=fill.view(native),
        index=index,
    )


_ByteOrder = Literal["<", ">", "="]
_Found = tuple[_ByteOrder, tuple[int, ...], ShardIndex | None]
_ORDERS: dict[str, _ByteOrder] = {"little": "<", "big": ">", "native": "="}


def _of_v2(array: zarr.Array[Any]) -> _Found | None:
    metadata: Any = array.metadata
    if metadata.compressor is not None or metadata.filters:
        return None
    places = tuple(range(array.ndim))
    order: _ByteOrder = ">" if array.dtype.byteorder == ">" else "<"
    return order, places[::-1] if metadata.order == "F" else places, None


def _of_v3(array: zarr.Array[Any], codecs: tuple[Any, ...]) -> _Found | None:
    index = None
    if len(codecs) == 1 and isinstance(codecs[0], ShardingCodec):
        sharding = codecs[0]
        index = _index(sharding, math.prod(array.shards or ()) // max(math.prod(array.chunks), 1))
        if index is None:
            return None
        codecs = tuple(sharding.codecs)
    *before, last = codecs
    if not isinstance(last, BytesCodec) or not all(isinstance(each, TransposeCodec) for each in before):
        return None
    axes = tuple(range(array.ndim))
    for each in before:
        axes = tuple(axes[place] for place in each.order)
    endian = _text(last.endian) if last.endian is not None else "native"
    return _ORDERS[endian], axes, index


def _index(sharding: ShardingCodec, chunks: int) -> ShardIndex | None:
    """None for an index that is itself compressed, or otherwise unusual."""
    first, *rest = sharding.index_codecs
    plain = isinstance(first, BytesCodec) and first.endian is not None and _text(first.endian) == "little"
    if not plain or len(rest) > 1 or not all(isinstance(each, Crc32cCodec) for each in rest):
        return None
    return ShardIndex(chunks, _text(sharding.index_location) == "start", bool(rest))


def _text(option: Any) -> str:
    """A codec's option as zarr's metadata names it: a member of an enum in zarr 3.1, a plain string in later ones."""
    return str(getattr(option, "value", option))


def chunk_places(index: ShardIndex, head: NDArray[np.uint8], nbytes: int, chunk_nbytes: int, name: str) -> NDArray[np.int64]:
    """Where a shard's chunks start, -1 for one that is not there; checked, so that nothing outside the shard is read.

    Args:
        index: how it is laid out.
        head: the index's bytes.
        nbytes: of the whole shard.
        chunk_nbytes: of each chunk.
        name: what errors call the shard.

    Raises:
        ValueError: the checksum does not match, or a chunk would not be inside.
    """
    entries = head[: index.chunks * _ENTRY]
    if index.checked and _crc32c(entries.tobytes()) != int.from_bytes(head[entries.size :].tobytes(), "little"):
        raise ValueError(f"{name} is broken: the checksum of its index does not match; it was cut off or written in part")
    table = entries.view("<u8").reshape(-1, 2)
    starts, lengths = table[:, 0], table[:, 1]
    there = starts != np.uint64(2**64 - 1)
    if bool(np.any(lengths[there] != chunk_nbytes)) or bool(np.any(starts[there] > nbytes - chunk_nbytes)):
        raise ValueError(f"{name} is broken: its index names chunks that are not inside its {nbytes:,} bytes")
    return np.where(there, starts.astype(np.int64), -1)


def _crc32c(data: bytes) -> int:
    from google_crc32c import value  # zarr's own choice, so it is there

    return int(value(data))
