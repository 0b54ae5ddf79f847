"""rowferry keeps large stores of rows outside the GPU and ferries the rows that training needs.

    import rowferry as rf

    with rf.Pipeline(rf.open_store("x.npy"), batch_size=4096, shuffle=True) as pipe:
        for batch in pipe:
            step(batch.data)

This list is the public API. Everything else, names with an underscore first of all, may change.
"""

from rowferry.pipeline import Batch as Batch
from rowferry.pipeline import Pipeline as Pipeline
from rowferry.pipeline import RowTable as RowTable
from rowferry.pipeline import RowTables as RowTables
from rowferry.pipeline import Stats as Stats
from rowferry.pipeline import WritableBatch as WritableBatch
from rowferry.pipeline import prefetch as prefetch
from rowferry.stores import ArrayStore as ArrayStore
from rowferry.stores import DeviceStore as DeviceStore
from rowferry.stores import MemmapStore as MemmapStore
from rowferry.stores import PinnedStore as PinnedStore
from rowferry.stores import RemoteStore as RemoteStore
from rowferry.stores import SafetensorsStore as SafetensorsStore
from rowferry.stores import Store as Store
from rowferry.stores import ZarrStore as ZarrStore
from rowferry.stores import as_store as as_store
from rowferry.stores import create_store as create_store
from rowferry.stores import open_store as open_store

__version__ = "0.1.0"
