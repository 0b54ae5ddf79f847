"""What moves, and when: from a sampler's index batches to batches of rows on a device, and back."""

from ._batch import Batch as Batch
from ._batch import WritableBatch as WritableBatch
from ._stats import Stats as Stats
from ._table_batch import LookupBatch as LookupBatch
from ._table_batch import TableBatch as TableBatch
from ._table_batch import TablesBatch as TablesBatch
from ._table_epoch import TableBatches as TableBatches
from .loader import Pipeline as Pipeline
from .prefetch import Prefetcher as Prefetcher
from .prefetch import prefetch as prefetch
from .table import RowTable as RowTable
from .table import RowTables as RowTables
