"""Rows in page-locked host memory: the home of a table that a GPU reads and writes over the bus."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor  # the class below has a method called torch

from ._bytes import gather_rows, scatter_rows
from ._contract import Store
from ._layout import check_layout, fill, identity_of, layout_of
from ._pinning import pinned_bytes


@final
class PinnedStore(Store):
    """Rows in one allocation of exact size: page-locked where there is CUDA, ordinary memory elsewhere, used alike.

    ``numpy()``, ``torch()`` and ``cupy()`` are views of that one memory, never copies; they stay valid when the
    store is closed or dies, and the memory is given back with the last of them, when the GPU that was current when the
    store was made is idle. Another GPU may still use it then: wait for its work on the views before you drop them.
    ``pinned`` tells whether it is really page-locked.

    With CuPy, ``scatter`` of CUDA values is a kernel on the current stream. Calls of the store are ordered after it; a
    view that you took before is not, so take it anew, or call ``flush()``.

    Args:
        shape: ``(rows, *row_shape)``.
        dtype: a torch dtype.
        name: what errors call the store.

    Raises:
        ValueError, TypeError: not a shape, not a torch dtype. MemoryError: no room, or the driver refused the lock.
    """

    writable = True
    owns_memory = True

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, name: str | None = None) -> None:
        self.shape = check_layout(shape, dtype)
        self.dtype = dtype
        self.name = name or "pinned memory"
        self.memory = pinned_bytes(self.nbytes, wait=True).view(dtype).view(self.shape)
        self.pinned = self.nbytes > 0 and self.memory.is_pinned()
        self._owner = os.getpid()

    # ---- ways to make one -----------------------------------------------------------------------------------

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, *, name: str | None = None) -> Self:
        """A store whose rows nobody has set."""
        return cls(shape, dtype, name=name)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: torch.dtype, *, name: str | None = None) -> Self:
        """A store of zeros: what a fresh allocation holds anyway, so this costs nothing over ``empty``."""
        return cls(shape, dtype, name=name)

    @classmethod
    def from_array(cls, array: Any, *, name: str | None = None) -> Self:
        """A store with a copy of a NumPy, torch (any device) or CuPy array, of its dtype, copied in pieces of 64 MiB.

        Raises:
            TypeError: another kind of object, or a dtype that torch does not have.
        """
        shape, dtype = layout_of(array)
        store = cls(shape, dtype, name=name)
        fill(store, array)
        return store

    @classmethod
    def load(cls, path: str | Path, *, name: str | None = None, **options: Any) -> Self:
        """A store with a copy of the rows of a file, of its dtype, read in pieces of at most 64 MiB.

        Args:
            path: anything that ``rowferry.open_store`` opens.
            name: what errors call the store; the path when None.
            options: passed on to ``open_store`` (``array``, ``dtype``).
        """
        from ._open import open_store  # _open knows every store, this one too

        with open_store(path, **options) as source:
            store = cls(source.shape, source.dtype, name=name or f"pinned copy of {source.name}")
            memory = store._held()
            for start, stop in source.spans():
                source.gather(range(start, stop), out=memory[start:stop])
        return store

    # ---- one memory, three views ----------------------------------------------------------------------------

    def torch(self) -> Tensor:
        """All rows as a CPU tensor over this memory: ``shape``, ``dtype``, no copy; writing to it writes the store."""
        self._require_open()
        self._settle()
        return self._held()

    def numpy(self) -> NDArray[Any]:
        """All rows as a NumPy array over this memory, no copy; writing to it writes the store.

        Raises:
            TypeError: NumPy has no such dtype (bfloat16, float8).
        """
        try:
            return np.asarray(self.torch().numpy())
        except TypeError as error:
            raise TypeError(
                f"NumPy has no {self.dtype}, the dtype of {self.name}; use torch(), or torch().view(torch.uint8)"
            ) from error

    def cupy(self) -> Any:
        """All rows as a CuPy array over this host memory, no copy: kernels on the current device read and write it.

        Raises:
            ImportError: CuPy is missing. RuntimeError: there is no CUDA device. TypeError: as for ``numpy()``.
        """
        from ._kernels import cupy_over  # the only file that imports CuPy

        return cupy_over(self.torch(), self.numpy().dtype)

    # ---- the contract ---------------------------------------------------------------------------------------

    @property
    def identity(self) -> Hashable:
        return identity_of(self._held())

    def any_order(self) -> bool:
        return True

    def _gather(self, rows: NDArray[np.int64], out: Tensor) -> None:
        gather_rows(self._held(), rows, out)

    def _scatter(self, rows: NDArray[np.int64], values: Tensor) -> None:
        scatter_rows(self._held(), rows, values)

    def _flush(self, sync: bool) -> None:
        del sync  # memory: nothing is behind it

    def _close(self) -> None:
        self.memory = None
        self.pinned = False

    def _held(self) -> Tensor:
        """The memory, in the process that has it. Also called for its check alone."""
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{self.name} was made in process {self._owner} and is not in this forked child: page-locked memory is not "
                "inherited; start workers with the 'spawn' method, or make the store in the worker"
            )
        if self.memory is None:
            raise ValueError(f"{self.name} is closed; its memory was given back")
        return self.memory
