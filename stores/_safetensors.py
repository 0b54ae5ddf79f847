"""Rows of one tensor of a .safetensors file, or of a model's many files behind an index."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from ._contract import Store
from ._file_reads import Cache, check_cache
from ._mapped_rows import MappedRows
from ._safetensors_header import INDEX_SUFFIX, MOST_INDEX_BYTES, Tensor, file_of, header_length, parse_header, tensor_named


@final
class SafetensorsStore(Store):
    """Rows of one tensor, where they lie in the file; read-only. Reading is as for ``MemmapStore``.

    bfloat16 and float8 come as such, by their bits. The header is not trusted: a tensor that reaches outside the file or
    overlaps another one is refused, whichever is asked for.

    Args:
        path: a ``.safetensors``, or the ``.safetensors.index.json`` of a model that is split over several; these lie beside it.
        array: the tensor's name; may be left out where the file has one only.
        dtype: checked against the tensor's, if given. No cast.
        cache: as for ``MemmapStore``.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` does. ValueError: a broken or cut off file, no tensor of that name
            (the error lists those there are), or one of rank 0. TypeError: elements that torch has no dtype for.
    """

    writable = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        array: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        cache: Cache = "keep",
    ) -> None:
        check_cache(cache)
        file = Path(path)
        if file.name.lower().endswith(INDEX_SUFFIX):
            file = _file_of(file, array)
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{file} is not a file")
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self._fd)
        try:
            self._open(file, array, dtype, cache)
        except BaseException:
            self._release()
            raise

    def _open(self, file: Path, array: str | None, dtype: torch.dtype | None, cache: Cache) -> None:
        name, tensor = self._find(file, array)
        self.name = f"{file}[{name}]"
        natural, stored = tensor.elements(self.name)
        if dtype not in (None, natural):
            raise TypeError(f"{self.name} has rows of {natural}, not {dtype}; cast with the pipeline's dtype=")
        self.shape, self.dtype = tensor.shape, natural
        seen = os.fstat(self._fd)
        self._identity = ("file", seen.st_dev, seen.st_ino, tensor.start)
        self._rows: MappedRows | None = MappedRows(
            self._fd, tensor.shape, natural, stored, offset=tensor.start, cache=cache, name=self.name
        )
        self.memory = self._rows.memory

    def _find(self, file: Path, array: str | None) -> tuple[str, Tensor]:
        size = os.fstat(self._fd).st_size
        length = header_length(os.pread(self._fd, 8, 0), size, str(file))
        tensors = parse_header(os.pread(self._fd, length, 8), size, str(file))
        return tensor_named(array, tensors, str(file))

    @property
    def identity(self) -> Hashable:
        return self._identity

    def resident(self) -> bool:
        """As ``Store.resident``; a tensor of up to 64 MiB is read in first."""
        return self._held().resident()

    def from_disk(self) -> bool:
        return self._held().from_disk

    def expect(self, rows: NDArray[np.int64]) -> None:
        self._held().expect(rows)

    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        self._held().gather(rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        del rows, values
        raise PermissionError(f"{self.name} is read-only; .safetensors can only be read")

    def _flush(self, sync: bool) -> None:
        del sync

    def _close(self) -> None:
        self.memory, self._rows = None, None
        self._release()

    def _held(self) -> MappedRows:
        rows = self._rows  # read once: another thread may close the store
        if rows is None:
            raise ValueError(f"{self.name} is closed; open it again")
        return rows


def _file_of(index: Path, array: str | None) -> Path:
    """Which of a model's files has the tensor, by its index. A file's name in it leads to no other folder."""
    with index.open("rb") as file:
        text = file.read(MOST_INDEX_BYTES + 1)
    return index.with_name(file_of(array, text, str(index)))
