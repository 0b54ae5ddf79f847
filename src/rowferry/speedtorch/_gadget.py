"""Data gadgets: any array of a file or of the script, read to the GPU and written from it by any index."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from rowferry.stores import ArrayStore, DeviceStore, MemmapStore, Store, as_store
from rowferry.stores._bytes import as_ints
from rowferry.stores._casts import cast
from rowferry.stores._devices import default_device

from ._common import Holder, _Common, _CommonMM
from ._homes import Home, cupy_home
from ._index import flatten
from ._views import cupy_view, load_npy, torch_view


class Gadget(Holder):
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
        store, device = self._store(), self._home.device if self._home.kind == "device" else default_device()
        if _names_rows(indexes, store):
            return store.read(indexes, device)
        index = _checked(indexes, store)[0]
        if store.memory is not None and not _is_basic(index):
            chosen = as_ints(torch_view(store))[_on(index, store.device)].view(store.dtype)
            return chosen.to(device)
        if _is_basic(index) and store.memory is not None and _positive(index):
            return _seen_from(store, index, device)
        return torch.from_numpy(np.ascontiguousarray(_host(store)[index])).to(device)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write a tensor (a parameter too), array or number into the places of ``indexes``, cast and broadcast as NumPy does.

        Raises:
            IndexError: out of range; nothing was written. PermissionError: the file cannot be written.
        """
        store = self._store()
        store._require_writable()
        values = dataObject.detach() if isinstance(dataObject, Tensor) else _tensor(dataObject)
        values = cast(values, store.dtype) if store.dtype.is_floating_point else values.to(store.dtype)
        index, shape = _checked(indexes, store)
        values = values.expand(shape)
        if _names_rows(indexes, store):
            store.scatter(indexes, values)
        elif store.memory is not None:
            store._settle()
            as_ints(store.memory)[_on(index, store.device)] = as_ints(values.contiguous()).to(store.device)
        else:
            raise ValueError(f"{store.name} is in Fortran order or another byte order; write whole rows of it, by number")

    def _store(self) -> Store:
        if not self._stores:
            self.gadgetInit()
        return self._held()["weight"]

    def _opened(self, name: str) -> Store:
        raise NotImplementedError


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


def _tensor(data: Any) -> Tensor:
    if isinstance(data, np.ndarray):
        return ArrayStore(data).gather(slice(None)) if data.ndim else torch.tensor(data.item())
    return torch.as_tensor(data)


def _names_rows(index: Any, store: Store) -> bool:
    """Whether an index is of whole rows by number: an array of integers, or a mask of as many as there are rows."""
    if isinstance(index, tuple | slice | int) or index is None or index is Ellipsis:
        return False
    if isinstance(index, list) and not index:
        return True
    array = index if isinstance(index, Tensor) else flatten(index)
    dtype = str(array.dtype).removeprefix("torch.")
    return dtype != "bool" or tuple(getattr(index, "shape", (len(store),))) == (len(store),)


def _checked(index: Any, store: Store) -> tuple[Any, tuple[int, ...]]:
    """``index`` with its arrays on the host, and the shape that it picks. NumPy checks it on an array without memory.

    Raises:
        IndexError: out of range.
    """
    parts = index if isinstance(index, tuple) else (index,)
    host = tuple(
        part if isinstance(part, slice | int | np.integer) or part is None or part is Ellipsis else _array(part) for part in parts
    )
    try:
        picked = np.broadcast_to(np.zeros((), np.uint8), store.shape)[host]
    except IndexError as error:
        raise IndexError(f"{error}, for {store.name} of shape {store.shape}") from None
    return host, picked.shape


def _array(part: Any) -> Any:
    shape = np.shape(part) if not hasattr(part, "shape") else tuple(part.shape)
    return np.asarray(flatten(part) if not isinstance(part, Tensor) else part.detach().cpu().numpy()).reshape(shape)


def _is_basic(index: tuple[Any, ...]) -> bool:
    return not any(isinstance(part, np.ndarray) for part in index)


def _positive(index: tuple[Any, ...]) -> bool:
    """Whether torch can view it: it has no slices that run backwards."""
    return all(not isinstance(part, slice) or part.step is None or part.step > 0 for part in index)


def _on(index: tuple[Any, ...], device: torch.device) -> Any:
    """The index for a tensor on ``device``; slices that run backwards as the numbers they name."""
    return tuple(torch.from_numpy(part).to(device) if isinstance(part, np.ndarray) else part for part in index)


def _seen_from(store: Store, index: Any, device: torch.device) -> Tensor:
    """A view of the data for ``device``, over the bus where it is in pinned memory and CuPy works; else a copy."""
    if store.device == device:
        return torch_view(store)[index]
    if isinstance(store, DeviceStore) or not store.pinned or isinstance(cupy_view(store), np.ndarray):
        return torch_view(store)[index].to(device)
    return torch.from_dlpack(cupy_view(store)[index])


def _host(store: Store) -> Any:
    return store.gather(slice(None)).cpu().numpy()
