"""Rows of a compressed zarr directory, decoded by tensorstore in its own threads, outside the GIL.

The only file that imports it.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from ._select import Selection

LONG = 256 << 10  # bytes of a run of rows from which a request of its own is cheaper than a list of row numbers

READS = 16  # in flight; tensorstore's own default is four, or as many as there are cores, which leaves a disk half idle

_log = logging.getLogger("rowferry")


@final
class TensorStoreRows:
    """One array as tensorstore reads it. Any thread, several at once.

    Args:
        array: what zarr sees; the reader is for its shape.
        directory: of the array.
        selection: what to read of each row.
        cache_bytes: of decoded chunks that tensorstore may keep.

    Raises:
        ValueError, NotImplementedError: tensorstore does not know the array's metadata.
    """

    def __init__(self, array: zarr.Array[Any], directory: Path, selection: Selection, cache_bytes: int) -> None:
        import tensorstore

        self._open, self._array = tensorstore.open, tensorstore.array
        self._context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": cache_bytes}, "file_io_concurrency": {"limit": READS}}
        )
        self._spec = {
            "driver": "zarr" if array.metadata.zarr_format == 2 else "zarr3",
            "kvstore": {"driver": "file", "path": f"{directory}/"},
            "recheck_cached_data": "open",
        }
        self._shape, self._itemsize = tuple(array.shape), array.dtype.itemsize
        self._part = selection.key
        self.refresh()

    def refresh(self) -> None:
        """Chunks that were cached before are looked at again before they are used."""
        opened = self._open(self._spec, open=True, read=True, context=self._context).result()
        if tuple(opened.shape) != self._shape or opened.dtype.numpy_dtype.itemsize != self._itemsize:
            raise ValueError(f"tensorstore sees {opened.shape} {opened.dtype}, zarr {self._shape}, {self._itemsize} bytes each")
        self._rows = opened[(slice(None), *self._part)] if self._part else opened

    def read(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        """Ascending distinct ``rows`` into ``target``, ``(len(rows), *selection.shape)``, of the elements' size."""
        edges = np.flatnonzero(np.diff(rows, prepend=-2, append=-2) != 1)  # of runs of neighbouring rows
        if target.nbytes < LONG * (edges.size - 1):
            self._into(self._rows[rows], target).result()
            return
        parts = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        written = [self._into(self._rows[rows[a] : rows[a] + b - a], target[a:b]) for a, b in parts]
        failed = [error for each in written if (error := each.exception()) is not None]  # when none is under way any more
        if failed:
            raise failed[0]

    def _into(self, found: Any, target: NDArray[Any]) -> Any:
        """Begin to put rows into ``target``, in native byte order; a future."""
        if found.dtype.numpy_dtype != target.dtype.newbyteorder("="):
            target = target.view(found.dtype.numpy_dtype)  # bfloat16 is a type of its own here
        return self._array(target, copy=False, write=True).write(found)


def open_rows(
    array: zarr.Array[Any], directory: Path, selection: Selection, cache_bytes: int, *, must: bool
) -> TensorStoreRows | None:
    """The array through tensorstore; None, with a line in the log, where it is not installed or cannot read it.

    Raises:
        ImportError, ValueError: the same, with ``must``.
    """
    if importlib.util.find_spec("tensorstore") is None:
        said = "tensorstore is not installed: pip install 'rowferry[tensorstore]'"
        if must:
            raise ImportError(f"decoder='tensorstore': {said}")
        _log.info("%s is decoded by zarr; %s", directory, said)
        return None
    try:
        return TensorStoreRows(array, directory, selection, cache_bytes)
    except (ValueError, NotImplementedError) as error:
        if must:
            raise ValueError(f"tensorstore cannot read {directory}: {error}") from error
        _log.info("%s is decoded by zarr, since tensorstore cannot read it: %s", directory, error)
        return None
