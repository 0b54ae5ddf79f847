"""Rows of a .npy, or of one tensor of a .safetensors, behind a URL, by their byte ranges."""

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
from ._safetensors_header import INDEX_SUFFIX, MOST_INDEX_BYTES, file_of, header_length, tensor_named
from ._safetensors_header import parse_header as parse_tensors
from ._url import kind_of_url, parse_url


@final
class RemoteStore(Store):
    """Rows of a .npy or of one tensor of a .safetensors, behind a URL; read-only. Each request fetches its rows' bytes and no
    others, but for gaps of up to 64 KiB.

    Requests are made by obstore, over a hundred at a time, and made again with back-off when one fails in transit.
    Whether the object is still the one that was opened is asked after each request for rows.

    Args:
        url: ``s3://bucket/x.npy`` or ``http(s)://host/x.npy``; ``gs://`` and ``az://`` go the same way and are untested.
        array: a tensor's name, as for ``SafetensorsStore``; ``url`` may be that of a model's .safetensors.index.json.
        dtype: as for ``MemmapStore`` and ``SafetensorsStore``.
        storage_options: passed on to obstore: its configuration, such as ``region``, ``endpoint`` or keys, and
            ``client_options``, ``retry_config``, ``credential_provider``. What is not given comes from the environment,
            by obstore's rules. Never shown.

    Raises:
        ImportError: without ``rowferry[remote]``. ValueError: a URL or options that cannot be taken, no such file, in
            Fortran order, of rank 0, or cut off. TypeError: elements that no torch dtype has.
        FileNotFoundError, PermissionError, OSError: as the server says.

    Threads: any number. In a forked child every call is a RuntimeError.
    """

    writable = False
    remote = True

    def __init__(
        self,
        url: str,
        *,
        array: str | None = None,
        dtype: torch.dtype | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        where = parse_url(url)
        kind = kind_of_url(where)
        if kind == "zarr":
            raise ValueError(f"{where.name} is a zarr, which ZarrStore reads; open_store opens either")
        if kind == "npy" and array is not None:
            raise ValueError(f"array={array!r} names one of several arrays; {where.name} is one .npy array")
        self._objects = RemoteObjects(where, storage_options)
        self._key, self.name = where.key, where.name
        if kind == "npy":
            self._open_npy(dtype)
        else:
            self._open_safetensors(array, dtype)

    def _open_npy(self, dtype: torch.dtype | None) -> None:
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

    def _open_safetensors(self, array: str | None, dtype: torch.dtype | None) -> None:
        if self._key.lower().endswith(INDEX_SUFFIX):
            index = self._objects.head(self._key, MOST_INDEX_BYTES + 1)
            self._key = file_of(array, index.data, self.name)
            self.name = f"{self.name.rpartition('/')[0]}/{self._key}"
        head = self._objects.head(self._key, MOST_HEADER_BYTES)
        length = header_length(head.data[:8], head.size, self.name)
        if 8 + length > len(head.data):
            head = self._objects.head(self._key, 8 + length)
        name, tensor = tensor_named(array, parse_tensors(head.data[8 : 8 + length], head.size, self.name), self.name)
        self.name = f"{self.name}[{name}]"
        natural, self._stored = tensor.elements(self.name)
        if dtype not in (None, natural):
            raise TypeError(f"{self.name} has rows of {natural}, not {dtype}; cast with the pipeline's dtype=")
        self.shape, self.dtype = tensor.shape, natural
        self._offset, self._version = tensor.start, head.version

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
