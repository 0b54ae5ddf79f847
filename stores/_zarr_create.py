"""Creating a zarr array in a layout that random rows want."""

from __future__ import annotations

import math
import operator
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
import zarr
import zarr.codecs

from ._zarr import ZarrStore
from ._zarr_open import ROWFERRY_DTYPE

CHUNK_BYTES = 64 << 10  # decoded together when one row is read: large enough for a disk, small enough to throw away
SHARD_BYTES = 64 << 20  # one file: few enough of them for a file system, small enough to be replaced whole
_COMPRESSORS = {"zstd": zarr.codecs.ZstdCodec, "blosc": zarr.codecs.BloscCodec}
Extents = SupportsIndex | Sequence[SupportsIndex]  # rows, or a length for each dimension
_INTEGERS = {1: torch.uint8, 2: torch.uint16}  # what zarr keeps elements as that it has no type for, by their bytes


def create_zarr(
    path: str | os.PathLike[str],
    shape: Sequence[SupportsIndex],
    dtype: torch.dtype,
    *,
    fill: float | complex | bool = 0,
    chunks: Extents | None = None,
    shards: Extents | Literal[False] | None = None,
    compressor: Literal["zstd", "blosc"] | None = None,
    like: ZarrStore | None = None,
) -> ZarrStore:
    """A new zarr v3 array at ``path``, opened for writing; no row is written, so all read as ``fill``.

    Args:
        path: a directory that does not exist yet.
        shape: ``(rows, *row_shape)``; zero rows are allowed.
        dtype: of the elements. bfloat16 and float8 are kept as unsigned integers with an attribute that
            ``ZarrStore`` knows, since zarr has no such type.
        fill: value of rows that were never written.
        chunks: rows of a chunk, or its whole shape; default: about 64 KiB of whole rows.
        shards: rows of a shard, or its whole shape, in whole chunks; default: about 64 MiB, at most the array;
            False: a file for each chunk. A scatter replaces whole shards, so a table trained on random rows
            wants small ones, or none.
        compressor: None keeps chunks raw; then the space of all rows is reserved while the store is open.
        like: a store of the same rank whose attributes and names of dimensions are taken over.

    Raises:
        FileExistsError: ``path`` exists. ValueError: a bad shape, chunks, shards or compressor.
        TypeError: no dtype of zarr has these elements. OSError: the disk is too full. In all cases no file is left.
    """
    target = Path(path)
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists; remove it, or choose another path")
    size = _checked_shape(shape)
    if compressor is not None and compressor not in _COMPRESSORS:
        raise ValueError(f"compressor is {compressor!r}; it must be one of {', '.join(map(repr, _COMPRESSORS))}, or None")
    stored, value = _stored(dtype, fill)
    chunk, shard = _layout(size, stored.itemsize, chunks, shards)
    codec: Any = _COMPRESSORS[compressor]() if compressor else None
    try:
        zarr.create_array(
            target,
            shape=size,
            dtype=stored,
            chunks=chunk,
            shards=shard,
            compressors=codec,
            fill_value=value,
            zarr_format=3,
            attributes=_attributes(dtype, like),
            dimension_names=like.describe()["dimension_names"] if like is not None else None,
        )
        return ZarrStore(target, "r+")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # ours: it did not exist before
        raise


def _checked_shape(shape: Sequence[SupportsIndex]) -> tuple[int, ...]:
    size = tuple(map(operator.index, shape))
    if not size or min(size) < 0:
        raise ValueError(f"shape is {tuple(shape)}; it must be (rows, *row shape), at least the rows, none negative")
    return size


def _attributes(dtype: torch.dtype, like: ZarrStore | None) -> dict[str, Any]:
    found = dict(like.attributes) if like is not None else {}
    found.pop(ROWFERRY_DTYPE, None)
    return found | ({ROWFERRY_DTYPE: str(dtype).removeprefix("torch.")} if _has_no_zarr_type(dtype) else {})


def _has_no_zarr_type(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16


def _stored(dtype: torch.dtype, fill: float | complex | bool) -> tuple[np.dtype[Any], Any]:
    """zarr's dtype for ``dtype``, and ``fill`` in it."""
    value = torch.tensor([fill]).to(dtype)
    if _has_no_zarr_type(dtype):
        value = value.view(_INTEGERS[dtype.itemsize])
    try:
        host = value.numpy()
    except TypeError as error:
        raise TypeError(f"dtype is {dtype}, which neither NumPy nor zarr has a type for") from error
    return host.dtype, host[0]


def _layout(
    shape: tuple[int, ...], itemsize: int, chunks: Extents | None, shards: Extents | Literal[False] | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of a chunk and a shard (None: no shards). Pure.

    Raises:
        ValueError: of another rank, not positive, or a shard that is not whole chunks.
    """
    rows, inner = max(shape[0], 1), tuple(max(n, 1) for n in shape[1:])
    row_nbytes = math.prod(inner) * itemsize
    wanted = min(max(CHUNK_BYTES // row_nbytes, 1), rows) if chunks is None else chunks
    chunk = _extents("chunks", wanted, inner)
    if shards is False:
        return chunk, None
    whole = tuple(-(-n // m) * m for n, m in zip(inner, chunk[1:], strict=True))  # the shard is whole along a row
    if shards is None:
        some = max(SHARD_BYTES // (math.prod(whole) * itemsize * chunk[0]), 1)
        shard = (min(some, -(-rows // chunk[0])) * chunk[0], *whole)
    else:
        shard = _extents("shards", shards, whole)
    if any(n % m for n, m in zip(shard, chunk, strict=True)):
        raise ValueError(f"shards of {shard} are not whole chunks of {chunk}; each length must be a multiple of the chunk's")
    return chunk, shard


def _extents(what: str, wanted: Extents, inner: tuple[int, ...]) -> tuple[int, ...]:
    extents = (operator.index(wanted), *inner) if isinstance(wanted, SupportsIndex) else tuple(map(operator.index, wanted))
    if len(extents) != 1 + len(inner) or min(extents) < 1:
        raise ValueError(
            f"{what} is {wanted}; it must be a number of rows, or one positive length for each of {1 + len(inner)} dimensions"
        )
    return extents
