"""Rows of a .npy behind a URL, by their byte ranges."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._byte_ranges import Records
from ._bytes import gather_rows
from ._contract import Store
from ._npy import MOST_HEADER_BYTES, parse_header
from ._remote import RemoteObjects
from ._rows import ascending
from ._url import parse_url


@final
class RemoteStore(Store):
    """Rows of a .npy behind a URL; read-only. Each request fetches its rows' bytes and no others, but for short gaps.

    Requests are made by obstore, over a hundred at a time, and made again with back-off when one fails in transit.
    Whether the object is still the one that was opened is asked after each request for rows.

    Args:
        url: ``s3://bucket/x.npy`` or ``http(s)://host/x.npy``; ``gs://`` and ``az://`` go the same way and are untested.
        dtype: as for ``MemmapStore``.
        storage_options: passed on to obstore: its configuration, such as ``region``, ``endpoint`` or keys, and
            ``client_options``, ``retry_config``, ``credential_provider``. What is not given comes from the environment,
            by obstore's rules. Never shown.

    Raises:
        ImportError: without ``rowferry[remote]``. ValueError: a URL or options that cannot be taken, no .npy file, in
            Fortran order, of rank 0, or cut off. TypeError: elements that no torch dtype has.
        FileNotFoundError, PermissionError, OSError: as the server says.

    Threads: any number. In a forked child every call is a RuntimeError.
    """

    writable = False

    def __init__(self, url: str, *, dtype: torch.dtype | None = None, storage_options: Mapping[str, Any] | None = None) -> None:
        where = parse_url(url)
        self.name, self._key = where.name, where.key
        self._objects = RemoteObjects(where, storage_options)
        head = self._objects.head(self._key, MOST_HEADER_BYTES)
        header = parse_header(head.data, dtype, self.name)
        if header.fortran and header.nbytes:
            raise ValueError(
                f"{self.name} is in Fortran order, each row in as many pieces as it has elements; copy it to a disk, and "
                f"`rowferry convert` it to C order"
            )
        needed = header.offset + header.nbytes
        if head.size < needed:
            raise ValueError(
                f"{self.name} is cut off: it has {head.size:,} bytes, and its header says {needed:,} "
                f"(shape {header.shape} of {header.stored}); it was not written to the end, or not copied whole"
            )
        self.shape, self.dtype = header.shape, header.dtype
        self._stored, self._offset, self._version = header.stored, header.offset, head.version

    @property
    def identity(self) -> Hashable:
        return ("remote", self.name)

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._objects.require_same_process()
        if not out.numel():
            return
        distinct, inverse = ascending(rows)
        found = out if inverse is None else out.new_empty(distinct.size, *self.row_shape)
        data = found.view(-1).view(torch.uint8).numpy().reshape(distinct.size, self.row_nbytes)
        starts = self._offset + distinct * self.row_nbytes
        there = self._objects.read([self._key], [Records(np.zeros_like(distinct), starts, data)])[0]
        if not there.all():
            raise FileNotFoundError(f"{self.name} was removed since it was opened")
        self._objects.require_unchanged(self._key, self._version)
        if not self._stored.isnative:
            np.copyto(data.view(self._stored.newbyteorder("=")), data.view(self._stored))
        if inverse is not None:
            gather_rows(found, inverse, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        raise AssertionError("a read-only store is refused before")

    def _flush(self, sync: bool) -> None:
        """Nothing is written."""

    def _close(self) -> None:
        """obstore's connections end with the last reference to them."""
