"""Data gadgets: any array of a file or of the script, read to the GPU and written from it by any index."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rowferry.stores import MemmapStore, Store, as_store
from rowferry.stores._bytes import as_ints
from rowferry.stores._casts import cast
from rowferry.stores._devices import default_device
from rowferry.stores._rows import check_index, to_host

from ._common import Holder, _Common, _CommonMM
from ._homes import Home, cupy_home
from ._views import cupy_view, load_npy, numpy_copy, torch_view


class Gadget(Holder, ABC):
    """What both do. Rows are the entries of the first dimension; row numbers are moved by ``Store.read`` and ``scatter``."""

    def _set_up(self, fileName: Any, CPUPinn: bool) -> None:
        super().__init__()
        self.fileName, self.CPUPinn = fileName, CPUPinn

    def gadgetInit(self) -> None:
        """Take the data in. The first use does it otherwise."""
        name = next(iter(self._begin().values()))
        self._stores["weight"] = self._opened(name)

    def getData(self, indexes: Any) -> Tensor:
        """A tensor on the GPU (without one on the CPU): of row numbers, masks and lists a copy, of slices and integers alone
        a view of the data where that can be (a file is copied).

        Args:
            indexes: what NumPy takes: an array, a slice, an integer, or a tuple of them.

        Raises:
            IndexError: out of range; nothing was read.
        """
        store, device = self._store(), default_device()
        if _names_rows(indexes):
            return store.read(indexes, device)
        index, _shape = _checked(indexes, store)
        if store.memory is None:
            return torch.from_numpy(np.array(numpy_copy(store)[index])).to(device)
        memory = torch_view(store)
        if memory.is_cuda:
            return as_ints(memory)[_on(index, memory.device)].view(store.dtype)
        if device.type == "cuda" and all(_is_viewed(part) for part in index):
            over_the_bus = cupy_view(store)
            if not isinstance(over_the_bus, np.ndarray):
                return from_dlpack(over_the_bus[index])
        found = np.asarray(as_ints(memory).numpy()[index])
        if any(step < 0 for step in found.strides):
            found = found.copy()  # torch has no steps backwards
        return torch.from_numpy(found).view(store.dtype).to(device)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write a tensor (a parameter too), array or number into the places of ``indexes``, cast and broadcast as NumPy does.

        Raises:
            IndexError: out of range; nothing was written. PermissionError: the file cannot be written.
        """
        store = self._store()
        store._require_writable()
        values = dataObject.detach() if isinstance(dataObject, Tensor) else torch.as_tensor(dataObject)
        values = cast(values, store.dtype) if store.dtype.is_floating_point else values.to(store.dtype)
        if _names_rows(indexes) or isinstance(indexes, slice | int | np.integer):
            store.scatter(indexes, values.expand(_picked(indexes, store)))
            return
        index, shape = _checked(indexes, store)
        if store.memory is None:
            raise ValueError(f"{store.name} is in Fortran order or another byte order; write whole rows of it, by number")
        values = as_ints(values.expand(shape).contiguous())
        store._settle()
        if store.memory.is_cuda:
            as_ints(store.memory)[_on(index, store.device)] = values.to(store.device)
        else:
            as_ints(store.memory).numpy()[index] = values.cpu().numpy()

    def _store(self) -> Store:
        if not self._stores:
            self.gadgetInit()
        return self._held()["weight"]

    @abstractmethod
    def _opened(self, name: str) -> Store:
        """The store of the data."""


@final
class DataGadget(Gadget, _Common):
    """A copy of a ``.npy`` file's rows, or of an array's, on the GPU or with ``CPUPinn`` in pinned memory."""

    def __init__(self, fileName: Any, CPUPinn: bool = False) -> None:
        self._set_up(fileName, CPUPinn)
        self._home = cupy_home(CPUPinn)

    def _opened(self, name: str) -> Store:
        make = partial(self._home.make, name=name)
        if isinstance(self.fileName, str | os.PathLike):
            return load_npy(self.fileName, make)
        source = as_store(self.fileName)
        return make(source.shape, source.dtype).copy_from(source)


@final
class DataGadgetMM(Gadget, _CommonMM):
    """The rows of a ``.npy`` file where they are: ``insertData`` writes the file. An array is used, not copied."""

    _home = Home("host")

    def __init__(self, fileName: Any, CPUPinn: bool = False) -> None:
        self._set_up(fileName, CPUPinn)

    def _opened(self, name: str) -> Store:
        if not isinstance(self.fileName, str | os.PathLike):
            return as_store(self.fileName)
        writable = os.access(self.fileName, os.W_OK)
        return MemmapStore(self.fileName, "r+" if writable else "r")


def _names_rows(index: Any) -> bool:
    """Whether an index is of whole rows by number: a list, an array of integers, or a mask of one dimension."""
    if isinstance(index, tuple | slice | int | np.integer) or index is None or index is Ellipsis:
        return False
    array = index if hasattr(index, "dtype") else np.asarray(index)
    return str(array.dtype).removeprefix("torch.") != "bool" or array.ndim == 1


def _picked(index: Any, store: Store) -> tuple[int, ...]:
    """The shape of the rows that such an index names."""
    if isinstance(index, Tensor) and index.is_cuda and index.dtype != torch.bool:
        return (*index.shape, *store.row_shape)
    return (*check_index(index, len(store), store.name)[1], *store.row_shape)


def _checked(index: Any, store: Store) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Any other index with its arrays on the host, and the shape of what it picks.

    Raises:
        IndexError: out of range, told by NumPy on an array of this shape that has no memory.
    """
    parts = index if isinstance(index, tuple) else (index,)
    plain = tuple(
        part if isinstance(part, slice | int | np.integer) or part is None or part is Ellipsis else to_host(part, 0)
        for part in parts
    )
    try:
        picked = np.broadcast_to(np.zeros((), np.uint8), store.shape)[plain]
    except IndexError as error:
        raise IndexError(f"{error}, in {store.name} of shape {store.shape}") from None
    return plain, picked.shape


def _is_viewed(part: Any) -> bool:
    """Whether an entry of an index makes a view that torch can have: no array, and no slice that runs backwards."""
    return not isinstance(part, np.ndarray) and not (isinstance(part, slice) and (part.step or 1) < 0)


def _on(index: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The index for a tensor on ``device``."""
    return tuple(torch.from_numpy(part).to(device) if isinstance(part, np.ndarray) else part for part in index)
