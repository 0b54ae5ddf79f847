"""Stores: rows of one shape and dtype, addressed by row number, in memory, in files, on a device."""

from ._array import ArrayStore as ArrayStore
from ._contract import Store as Store
from ._device import DeviceStore as DeviceStore
from ._memmap import MemmapStore as MemmapStore
from ._open import as_store as as_store
from ._open import create_store as create_store
from ._open import open_store as open_store
from ._pinned import PinnedStore as PinnedStore
from ._remote_store import RemoteStore as RemoteStore
from ._safetensors import SafetensorsStore as SafetensorsStore
from ._zarr import ZarrStore as ZarrStore

__all__ = [
    "ArrayStore",
    "DeviceStore",
    "MemmapStore",
    "PinnedStore",
    "RemoteStore",
    "SafetensorsStore",
    "Store",
    "ZarrStore",
    "as_store",
    "create_store",
    "open_store",
]
