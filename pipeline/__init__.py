"""What moves, and when: from a sampler's index batches to batches of rows on a device, and back."""

from ._batch import Batch as Batch
from ._batch import WritableBatch as WritableBatch
from ._stats import Stats as Stats
from .loader import Pipeline as Pipeline
from .prefetch import Prefetcher as Prefetcher
from .prefetch import prefetch as prefetch
