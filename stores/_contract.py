"""What every store promises: rows of one shape and dtype, addressed by row number.

Guarantees:
- An index is checked whole before anything is read or written; it is neither changed nor kept.
- Rows come back in the order asked for, duplicates kept, C-contiguous, in native byte order.
- ``gather`` may run in several threads at once, also beside a ``scatter`` of *other* rows.

Assumes:
- One writer. Two threads that scatter at once must write different rows.

Notes for implementers: a concrete store is final, lives in a file of its own, imports its backend there,
and writes only what is abstract here. Everything else is implemented once, in this class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._bytes import apart
from ._casts import cast, castable
from ._in_flight import UsedByKernels
from ._rows import check_index, last_of_each, pieces
from ._views import to_tensor
from ._whereabouts import Whereabouts

PIECE_BYTES = 64 << 20  # init_, copy_from and save hold at most this much in memory at a time


class Store(Whereabouts, UsedByKernels, ABC):
    """Rows of one shape and dtype. See the module's guarantees, and ``Whereabouts`` for where they lie.

    Attributes:
        name: what errors and logs call it (a path, or a description).
        shape: ``(rows, *row_shape)``.
        dtype: a torch dtype; rows are torch tensors of it.
        writable: whether ``scatter`` is allowed.
        remote: rows come over a network: each request has its way there and back.
        chunk_rows: rows that are read or written together (1 where rows are independent); callers that split a
            request do it between chunks.
        block_rows: rows of a chunk of the file, which ``shuffle="chunks"`` keeps together; 1 where it has none.
        identity: equal for two stores over the same memory or file; a writable pipeline refuses the same twice.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    writable: bool
    remote: bool = False
    chunk_rows: int = 1
    block_rows: int = 1

    # ---- what a concrete store implements -------------------------------------------------------------------

    @property
    @abstractmethod
    def identity(self) -> Hashable:
        """Equal for two stores over the same memory or file. Cheap; never reads rows."""

    @abstractmethod
    def _gather(self, rows: NDArray[np.int64], out: torch.Tensor) -> None:
        """Copy ``rows`` (1-d, in range, any order, repeats allowed) into ``out``, ``(len(rows), *row_shape)``.

        ``out`` is C-contiguous, on ``self.device``, of the store's dtype, and belongs to the caller. One long
        call that releases the GIL, never a Python call a row. Any thread, several at once.
        """

    @abstractmethod
    def _scatter(self, rows: NDArray[np.int64], values: torch.Tensor) -> None:
        """Copy ``values`` (as ``out`` of ``_gather``) into ``rows``, which are in range and distinct.

        One thread at a time; threads may gather other rows meanwhile. Other bytes of the store keep their value.
        """

    @abstractmethod
    def _flush(self, sync: bool) -> None:
        """See ``flush``."""

    def _flush_to_close(self) -> None:
        """What ``close`` flushes: all, but where only a pipeline's flush counts."""
        self._flush(False)

    @abstractmethod
    def _close(self) -> None:
        """Give up handles and memory; called once. Views that the user holds stay valid."""

    # ---- what users call ------------------------------------------------------------------------------------

    @final
    def __len__(self) -> int:
        return self.shape[0]

    @final
    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row: ``shape[1:]``."""
        return self.shape[1:]

    @final
    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @final
    @property
    def nbytes(self) -> int:
        """Bytes of all rows (of the values, not of a compressed file)."""
        return self.row_nbytes * len(self)

    @final
    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return bool(self.__dict__.get("_closed", False))

    @final
    def gather(self, index: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows in the order asked for: shape ``index.shape + row_shape``, the store's dtype, always a copy.

        Args:
            index: list, range, slice, NumPy, torch or CuPy array of any integer type and shape, or a bool mask
                of length n. Negative counts from the end.
            out: where to put them: C-contiguous, the result's shape and dtype, on the store's device.

        Raises:
            IndexError: a row is out of range; nothing was read.
            TypeError: the index is not of integers or bools, or ``out`` does not fit.
        """
        self._require_open()
        rows, shape = check_index(index, len(self), self.name)
        full = (*shape, *self.row_shape)
        if out is None:
            out = torch.empty(full, dtype=self.dtype, device=self.device)
        elif tuple(out.shape) != full or out.dtype != self.dtype or not out.is_contiguous() or out.device != self.device:
            given = f"{tuple(out.shape)} {out.dtype} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
            raise TypeError(f"out for {self.name} is {given}; it must be contiguous, {full} {self.dtype} on {self.device}")
        if rows.size:
            self._settle(reading=True)
            self._gather(rows, out.view(rows.size, *self.row_shape))
        return out

    @final
    def scatter(self, index: Any, values: torch.Tensor | NDArray[Any]) -> None:
        """Write ``values`` (``index.shape + row_shape``, cast to the store's dtype) into the rows of ``index``.

        A row that occurs twice keeps the last value. ``values`` may be on any device, also rows of this store, and is copied.
        The store has the rows on return; a ``DeviceStore``, and a ``PinnedStore`` of CUDA values, in stream order (its later
        calls wait for them).

        Raises:
            IndexError, TypeError, ValueError: bad index, dtype or shape; nothing was written.
            PermissionError: the store is read-only.
        """
        self._require_open()
        self._require_writable()
        values = to_tensor(values)
        if values.is_cuda or self.device.type == "cuda":
            from ._write import write  # needs kernels and devices, as read does

            if write(self, index, values):
                return
        rows, shape = check_index(index, len(self), self.name)
        self._require_fit(values, shape)
        self._settle()  # before values are looked at: they may be rows of this store
        values = self._own(values).reshape(rows.size, *self.row_shape)
        if not rows.size:
            return
        keep = last_of_each(rows)
        if keep is not None:
            rows, values = rows[keep], values[torch.from_numpy(keep)]
        self._scatter(np.ascontiguousarray(rows), values.contiguous())

    @final
    def read(self, index: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows on ``device``, on demand: ready on the current stream, no thread, no prefetch. See ``_read.read``."""
        self._require_open()
        from ._read import read  # _read needs kernels and devices, which the contract must not import

        return read(self, index, device, dtype)

    @final
    def flush(self, sync: bool = False) -> None:
        """Make what was written survive a crash of the process, with ``sync`` one of the machine.

        ``sync`` promises what the file system promises for fsync. Nothing to do for memory.
        """
        self._require_open()
        self._settle(reading=True)
        self._flush(sync)

    @final
    def close(self) -> None:
        """Flush and give up handles; idempotent. Calls after it raise ValueError."""
        if self.closed:
            return
        self._settle()
        if self.writable:
            self._flush_to_close()
        self.__dict__["_closed"] = True
        self._close()

    @final
    def __enter__(self) -> Self:
        return self

    @final
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @final
    def init_(self, initializer: Callable[..., Any], *args: Any, seed: int | None = None, **kwargs: Any) -> Self:
        """Fill all rows by a torch initializer (``torch.nn.init.normal_``, ...), in pieces of at most 64 MiB.

        ``initializer(piece, *args, **kwargs)`` gets a CPU tensor ``(k, *row_shape)``; with ``seed`` each piece is
        drawn under that seed and its first row, and the caller's generator is left as it was.
        """
        self._require_open()
        self._require_writable()
        self._settle()
        from ._filling import init  # pieces, seeds and generators: nothing of the contract

        init(self, PIECE_BYTES, lambda piece: initializer(piece, *args, **kwargs), seed)
        return self

    @final
    def copy_from(self, other: Store) -> Self:
        """Copy all rows of ``other`` (same shape; cast to this dtype), in pieces of at most 64 MiB."""
        self._require_open()
        self._require_writable()
        if other.shape != self.shape:
            raise ValueError(f"cannot copy {other.name} {other.shape} into {self.name} {self.shape}: the shapes must be equal")
        castable(other.dtype, self.dtype, self.name)
        self._settle()
        for start, stop in self.spans():
            piece = other.gather(range(start, stop))
            self._scatter(np.arange(start, stop), self._own(piece))
        return self

    @final
    def save(self, path: str | Path) -> None:
        """Write all rows to ``path`` (``.npy`` or ``.zarr``), in pieces of at most 64 MiB.

        Written under a temporary name beside it, made durable, then renamed: ``path`` is the old file or the
        whole new one.
        """
        self._require_open()
        from ._save import save  # creating a file needs the concrete stores, which the contract must not import

        save(self, path)

    # ---- shared helpers -------------------------------------------------------------------------------------

    @final
    def spans(self, limit: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
        """``(start, stop)`` spans that cover all rows, whole chunks, at most ``limit`` bytes each where possible."""
        yield from pieces(len(self), self.row_nbytes, limit, self.chunk_rows)

    @final
    def _require_fit(self, values: torch.Tensor, shape: tuple[int, ...]) -> None:
        full = (*shape, *self.row_shape)
        if tuple(values.shape) != full:
            raise ValueError(f"values for {self.name} have shape {tuple(values.shape)}; the index asks for {full}")

    @final
    def _own(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` in the store's dtype, rounded once, on its device. TypeError where that would lose more."""
        castable(values.dtype, self.dtype, self.name)
        return apart(cast(values, self.dtype).to(self.device), self.memory)

    @final
    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed; open it again")

    @final
    def _require_writable(self) -> None:
        if not self.writable:
            raise PermissionError(f"{self.name} is read-only; open it with mode='r+' to write")

    @final
    def __repr__(self) -> str:
        kind, dtype = type(self).__name__, str(self.dtype).removeprefix("torch.")
        state = "closed" if self.closed else ("read-write" if self.writable else "read-only")
        dims = "x".join(map(str, self.shape))
        return f"<{kind} {self.name}: {dims} {dtype}, {self.row_nbytes:,} bytes a row, {state}>"
