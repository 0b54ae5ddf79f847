"""Arrays and tensors over a store's rows, copies of them, and the files that scripts save and load."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores import ArrayStore, MemmapStore, Store, create_store
from rowferry.stores._files import beside, replace
from rowferry.stores._kernels import available, cupy_of, cupy_over

Make = Callable[[Sequence[int], torch.dtype], Store]


def torch_view(store: Store) -> Tensor:
    """All rows as a tensor over the store's memory, no copy; what kernels wrote is in it.

    Raises:
        ValueError: a file in Fortran order or another byte order, which no tensor can lie over.
    """
    store.flush()
    if store.memory is None:
        raise ValueError(f"{store.name} is in an order of bytes or dimensions that no tensor has; use getNumpyVersion()")
    return store.memory


def cupy_view(store: Store) -> Any:
    """All rows as an array over the store's memory, no copy.

    A CuPy array where the memory is a GPU's or page-locked and CuPy works; without CuPy a tensor on the GPU; else NumPy's.
    """
    memory = torch_view(store)
    if memory.is_cuda:
        return cupy_of(memory) if available(memory.device) else memory
    array = memory.numpy()
    on_gpu = store.pinned and available(torch.device("cuda"))
    return cupy_over(memory, array.dtype) if on_gpu else array


def numpy_copy(store: Store) -> NDArray[Any]:
    """All rows, copied."""
    return np.asarray(store.gather(slice(None)).cpu().numpy())


def save_npy(file: Any, stores: Sequence[Store], *, stacked: bool) -> None:
    """One store as ``.npy`` (which the name gets when it lacks it), or several of one shape ``stacked`` in one array.

    Written in pieces, under another name first. ``file`` may be an open file; then the rows are copied once.
    """
    if not isinstance(file, str | os.PathLike):
        copies = [numpy_copy(store) for store in stores]
        np.save(file, np.stack(copies) if stacked else copies[0])
        return
    name = os.fspath(file)
    path = Path(name if str(name).endswith(".npy") else f"{name}.npy")
    if not stacked:
        stores[0].save(path)
        return
    with beside(path) as temporary:
        with create_store(temporary, (len(stores), *stores[0].shape), stores[0].dtype) as whole:
            for number, store in enumerate(stores):
                for start, stop in store.spans():
                    torch_view(whole)[number, start:stop].copy_(store.gather(range(start, stop)))
            whole.flush(sync=True)
        replace(temporary, path)


def load_npy(path: Any, make: Make) -> Store:
    """A new store with a copy of the rows of a ``.npy`` of any name."""
    with MemmapStore(path) as source:
        return make(source.shape, source.dtype).copy_from(source)


def load_stacked(path: Any, makers: Sequence[Make]) -> list[Store]:
    """New stores, one for each array of a stack that ``save_npy`` wrote.

    Raises:
        ValueError: another number of arrays.
    """
    with MemmapStore(path) as source:
        if len(source) != len(makers):
            raise ValueError(f"{path} holds {len(source)} arrays of optimizer state; {len(makers)} are kept here")
        return [
            make(rows.shape, rows.dtype).copy_from(ArrayStore(rows))
            for make, rows in zip(makers, torch_view(source), strict=True)
        ]


def load_torch(file: Any) -> Any:
    """What ``torch.save`` wrote of tensors, on the CPU; mapped, not read, where the file's form allows it."""
    mapped = isinstance(file, str | os.PathLike) and zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
