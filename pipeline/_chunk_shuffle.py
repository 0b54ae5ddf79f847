"""``shuffle="chunks"``: which stores' chunks are kept together, how many are mixed, and the batches of that order.

The order itself is ``_chunk_order``'s; how its groups are read where the CPU serves them, ``_mixing``'s.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from rowferry.stores import Store
from rowferry.stores._rows import rows_read_for_a_row

from . import _sampling
from ._chunk_order import ChunkOrder, Groups, Mixed
from ._planner import WINDOW_ROWS
from ._run import Parts
from ._sampling import BatchSource, StatefulItem
from ._source import Source

logger = logging.getLogger("rowferry")

CHUNK_BYTES = 1 << 20  # smaller chunks are taken several together: from there on a disk is no faster
GROUP_BYTES, GROUP_ROWS, FEWEST_CHUNKS = 32 << 20, 1 << 20, 8  # of a group, unless ``shuffle_chunks`` says so
SLOT_BYTES = 32 << 20  # of rows that are read in order: a piece for each of two threads
DEAR = 8  # rows read for a row used, from which a plain shuffle is worth a warning

Shuffle = bool | Literal["chunks"]


@final
@dataclass(frozen=True)
class ChunkShuffled:
    """A ``BatchSource`` of ``Mixed`` places; seeks to any batch at no cost."""

    n_rows: int
    batch_size: int
    drop_last: bool
    seed: int
    chunk_rows: int
    together: int

    def __len__(self) -> int:
        return self.n_rows // self.batch_size if self.drop_last else -(-self.n_rows // self.batch_size)

    def epoch(self, number: int, skip: int = 0, state: Any = None) -> Iterator[StatefulItem]:
        """See ``BatchSource``; ``skip`` tells all that ``state`` could."""
        del state
        if skip > len(self):
            raise RuntimeError(f"cannot resume at batch {skip}: an epoch has {len(self)} batches")
        groups = Groups(ChunkOrder(self.n_rows, self.chunk_rows, self.together, self.seed, number))
        starts = range(skip * self.batch_size, len(self) * self.batch_size, self.batch_size)
        return (StatefulItem(Mixed(groups, start, min(start + self.batch_size, self.n_rows))) for start in starts)


def make_batches(
    source: Source,
    index: Any,
    batch_size: int | None,
    shuffle: Shuffle,
    shuffle_chunks: int | Literal["auto"],
    drop_last: bool,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    seed: int,
) -> BatchSource:
    """``_sampling.make_source`` for a pipeline's arguments, and ``shuffle="chunks"`` over the chunks of its first table.

    Raises:
        ValueError: an unknown ``shuffle``; ``shuffle_chunks`` without it, or not positive; ``index`` without a
            ``batch_sampler``. Else as ``make_source``.
    """
    if not isinstance(shuffle, (bool, np.bool_)) and shuffle != "chunks":
        raise ValueError(f"shuffle is {shuffle!r}; it must be False, True or 'chunks'")
    if shuffle_chunks != "auto" and (shuffle != "chunks" or operator.index(shuffle_chunks) < 1):
        raise ValueError(f"shuffle_chunks is {shuffle_chunks!r}; it is a positive number, for shuffle='chunks'")
    table = source.tables[0]
    made = _sampling.make_source(  # refuses what does not fit together
        table.rows,
        batch_size=batch_size,
        shuffle=bool(shuffle),
        drop_last=drop_last,
        sampler=sampler,
        batch_sampler=batch_sampler,
        seed=seed,
    )
    if index is not None and batch_sampler is None:
        raise ValueError("index= takes the rows from a batch_sampler's items; pass a batch_sampler, or leave index out")
    if shuffle != "chunks" or not isinstance(made, _sampling.BuiltIn):
        return made
    stores = [column.store for column in table.columns]
    rows = chunk_rows(stores)
    together = default_together(stores, rows) if shuffle_chunks == "auto" else operator.index(shuffle_chunks)
    return ChunkShuffled(made.n_rows, made.batch_size, made.drop_last, made.seed, rows, together)


def chunk_rows(stores: Sequence[Store]) -> int:
    """Rows that are kept together: about 1 MiB, in whole chunks of every store where that is not far more than the
    largest chunk."""
    row_nbytes = max(sum(store.row_nbytes for store in stores), 1)
    found = [store.block_rows for store in stores if store.block_rows > 1]
    if not found:
        return max(CHUNK_BYTES // row_nbytes, 1)
    whole = math.lcm(*found)
    whole = whole if whole <= 4 * max(found) else max(found)
    return whole * max(CHUNK_BYTES // (whole * row_nbytes), 1)


def default_together(stores: Sequence[Store], rows: int) -> int:
    """Chunks of ``rows`` rows that are mixed: about 32 MiB, at most about a million rows, at least 8."""
    row_nbytes = max(sum(store.row_nbytes for store in stores), 1)
    return max(min(GROUP_BYTES // row_nbytes, GROUP_ROWS) // rows, FEWEST_CHUNKS)


def staging(batches: BatchSource, source: Source, depth: int, wanted: int | None) -> int | None:
    """``staging_bytes`` where the user leaves it out and files are read in order, or by chunks: little.

    Large windows save reading where rows are random. Here they save nothing, and small ones stay in the caches.
    """
    if not isinstance(batches, ChunkShuffled | _sampling.BuiltIn) or getattr(batches, "shuffle", False):
        return wanted
    if wanted is not None or any(store.memory is not None for store in source.stores):
        return wanted
    batch_bytes = source.tables[0].row_nbytes * min(batches.batch_size, batches.n_rows)
    return depth * max(SLOT_BYTES, batch_bytes + batch_bytes // 4)


def warn_if_dear(batches: BatchSource, parts: Parts) -> None:
    """Log a warning for each store of which a plain shuffle would read far more rows than it uses."""
    if not isinstance(batches, _sampling.BuiltIn) or not batches.shuffle:
        return
    row_nbytes = max(parts.source.tables[0].row_nbytes, 1)
    window = min(parts.arenas.slot_bytes // row_nbytes, parts.settings.lookahead * batches.batch_size, WINDOW_ROWS)
    for store in parts.source.stores:
        read = rows_read_for_a_row(len(store), store.chunk_rows, window)
        if read > DEAR:
            said = "%s: shuffle=True reads about %.0f rows for a row used, since chunks of %d rows are decoded whole; %s"
            remedy = "shuffle='chunks' reads each chunk once, and 'rowferry convert' makes smaller chunks, or raw ones"
            logger.warning(said, store.name, read, store.chunk_rows, remedy)
