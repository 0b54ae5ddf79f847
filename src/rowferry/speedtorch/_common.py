"""What switchers, gadgets and matrices share: stores, where they live, how they are seen, saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rowferry.stores import ArrayStore, Store
from rowferry.stores._casts import cast

from ._homes import Home, free_files
from ._index import Flat, flatten
from ._views import cupy_view, load_npy, load_stacked, load_torch, numpy_copy, save_npy, torch_view


class Ahead(Protocol):
    """A running ``prefetch``, as far as a switcher asks it."""

    def read(self, holder: Holder, column: str, rows: Flat) -> Tensor | None:
        """The batch's rows, one a slot; None when these are not the rows of the batch (what was written has landed then)."""

    def write(self, holder: Holder, column: str, rows: Flat, values: Tensor) -> None:
        """Put the batch's rows back. RuntimeError when these are not its rows."""

    def flush(self) -> None:
        """Return when all that was written is in the stores."""


class Holder:
    """Stores by column, in one home. Nothing is allocated before an init or a load.

    One thread uses it. Reads and writes are on the torch stream that is current where rows are.
    """

    _several = False  # whether what is seen and saved is a list, one entry a column, or the only column itself
    _home = Home("device")
    _diskname = "variable"

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._ahead: Ahead | None = None

    def getNumpyVersion(self) -> Any:
        """All rows as a NumPy array, copied; of optimizer state a list of arrays."""
        return self._seen(numpy_copy)

    def _getReshapedRetrieval(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> Flat:
        """Flat row numbers, positives first."""
        return flatten(retrievedPosIndexes, retrievedNegIndexes)

    # ---- stores ---------------------------------------------------------------------------------------------

    def _columns(self) -> Sequence[str]:
        """The names of the stores, also before they are made."""
        return ("weight",)

    def _begin(self) -> dict[str, str]:
        """Give up the stores, and name the ones to come. RuntimeError while a prefetch uses them."""
        if self._ahead is not None:
            raise RuntimeError(
                f"{type(self).__name__} cannot be initialised or loaded inside a prefetch loop; end the loop first"
            )
        for store in self._stores.values():
            store.close()
        self._stores = {}
        columns = self._columns()
        if self._home.kind != "disk":
            return {column: f"{column} of a {type(self).__name__}" for column in columns}
        suffixes = [f".{column}" for column in columns] if self._several else [""]
        return dict(zip(columns, free_files(self._diskname, suffixes), strict=True))

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Stores of zeros for all columns, in place of those that were there."""
        for column, name in self._begin().items():
            self._stores[column] = self._home.make(shape, dtype, name)

    def _held(self) -> dict[str, Store]:
        """The stores, with all that a prefetch was given to write.

        Raises:
            RuntimeError: none was made yet.
        """
        if not self._stores and self._columns():
            raise RuntimeError(f"this {type(self).__name__} holds nothing yet: call one of its Init methods first, or load")
        if self._ahead is not None:
            self._ahead.flush()
        return self._stores

    def _seen(self, view: Any) -> Any:
        found = [view(store) for store in self._held().values()]
        return found if self._several else found[0]

    # ---- rows -----------------------------------------------------------------------------------------------

    def _read(self, column: str, rows: Flat, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        if self._ahead is not None:
            found = self._ahead.read(self, column, rows)
            if found is not None:
                return found if dtype is None else cast(found, dtype)
        return self._held()[column].read(rows, device, dtype)

    def _write(self, column: str, rows: Flat, values: Tensor) -> None:
        if self._ahead is not None:
            self._ahead.write(self, column, rows, values)
        else:
            self._held()[column].scatter(rows, values)


class CupyForms(Holder):
    """The methods of classes that were CuPy's."""

    def getCupyVar(self) -> Any:
        """All rows as an array over their memory, no copy; see ``CUPYcorpus``. Of optimizer state a list of them."""
        return self._seen(cupy_view)

    def saveCupy(self, saveFileName: Any) -> None:
        """A ``.npy`` file, whose name gets ``.npy`` when it lacks it; optimizer state as one array, stacked."""
        save_npy(saveFileName, list(self._held().values()), stacked=self._several)

    def loadCupy(self, loadFileName: Any) -> None:
        """Rows of a ``.npy`` of exactly this name, into memory of this class's kind."""
        names = self._begin()
        makers = [partial(self._home.make, name=name) for name in names.values()]
        found = load_stacked(loadFileName, makers) if self._several else [load_npy(loadFileName, makers[0])]
        self._stores = dict(zip(names, found, strict=True))


class TorchForms(Holder):
    """The methods of classes that were PyTorch's."""

    def getTorchVar(self) -> Any:
        """All rows as a tensor over their memory, no copy. Of optimizer state a list of them."""
        return self._seen(torch_view)

    def saveTorch(self, saveFileName: Any) -> None:
        """A plain tensor (of optimizer state a list of them) by ``torch.save``."""
        torch.save(self._seen(torch_view), saveFileName)

    def loadTorch(self, loadFileName: Any) -> None:
        """What ``saveTorch`` wrote, also of old versions, into memory of this class's kind. Nothing in it is executed."""
        loaded = load_torch(loadFileName)
        tensors = loaded if isinstance(loaded, list | tuple) else [loaded]
        if len(tensors) != len(self._columns()) or not all(isinstance(each, Tensor) for each in tensors):
            raise ValueError(
                f"{loadFileName} does not hold {len(self._columns())} tensors, as {type(self).__name__} saves them"
            )
        for (column, name), tensor in zip(self._begin().items(), tensors, strict=True):
            source = ArrayStore(tensor.contiguous())
            self._stores[column] = self._home.make(source.shape, source.dtype, name).copy_from(source)


class _Common(CupyForms):
    """Base of the classes whose rows are CuPy arrays: on the GPU, or in pinned memory."""

    @property
    def CUPYcorpus(self) -> Any:
        """All rows over their memory: a CuPy array with CuPy on a GPU, else a NumPy array (or a tensor on the GPU)."""
        return self.getCupyVar()


class _CommonMM(CupyForms):
    """Base of the classes whose rows are in ``.npy`` files on disk, mapped."""

    _home = Home("disk")

    @property
    def CUPYmemmap(self) -> Any:
        """All rows as a NumPy array over the mapped file; of optimizer state a list of them."""
        return self.getCupyVar()

    def getCupyMM(self) -> Any:
        """The same as ``CUPYmemmap``."""
        return self.getCupyVar()

    def _preInit(self) -> None:
        """Nothing is needed before an init; scripts may call it."""


class _GPUPytorchCommon(TorchForms):
    """Base of the classes whose rows are tensors on the GPU."""

    @property
    def pytorchGPUVar(self) -> Any:
        """All rows as a tensor over their memory; of optimizer state a list of them."""
        return self.getTorchVar()


class _CPUPytorchCommon(TorchForms):
    """Base of the classes whose rows are tensors in pinned memory."""

    _home = Home("pinned")

    @property
    def pytorchCPUVar(self) -> Any:
        """All rows as a CPU tensor over pinned memory; of optimizer state a list of them."""
        return self.getTorchVar()


class _PytorchCommon(_GPUPytorchCommon):
    """Base of the classes whose rows are where ``deviceType`` and ``pinType`` say; ``pytorchGPUVar`` there, too."""
