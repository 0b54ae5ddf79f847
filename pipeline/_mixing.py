"""Reads the rows of a chunk shuffle in their order where ascending rows are cheaper: a group at a time, then mixed.

Guarantees:
- While all goes well the store is asked for the rows of a group once, ascending, so each chunk is read and decoded once,
  wherever windows and batches end.
- Where a group cannot be read, rows are asked for as they are needed: an error is that of the batch that needs them.
- One group is held, of at most ``MOST_BYTES``; of larger ones rows are asked for as they are needed, too.
"""

from __future__ import annotations

import functools
import logging
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores import Store
from rowferry.stores._bytes import gather_rows
from rowferry.stores._device_contract import Device

from ._chunk_order import Group, Groups, Mixed
from ._engine import Host, Task, pause

MOST_BYTES = 256 << 20
PIECE_BYTES = 4 << 20  # that a thread mixes in one call

_log = logging.getLogger("rowferry")


@final
class Mixing:
    """The rows of one store. One thread at a time; it shares the copies with those of the host."""

    def __init__(self, device: Device, store: Store, threads: int) -> None:
        self._device = device
        self._store = store
        self._threads = threads
        self._memory: Tensor | None = None
        self._held: tuple[Groups, int] | None = None  # in the memory; of an epoch, for a store may be written between two
        self._refused: tuple[Groups, int] | None = None  # could not be read

    def fetch(self, host: Host, mixed: Mixed, out: Tensor) -> Task:
        """``out`` gets the rows of ``mixed``."""
        row_nbytes, at = max(self._store.row_nbytes, 1), 0
        for number, group, part in mixed.parts():
            places = group.places[part]
            target = out[at : at + places.size]
            at += places.size
            source = self._rows_of(group, (mixed.groups, number))
            if source is None:
                self._store._gather(group.rows[places], target)
            else:
                step = max(PIECE_BYTES // row_nbytes, 1)
                spans = [(start, min(start + step, places.size)) for start in range(0, places.size, step)]
                host.spread(functools.partial(_mix, source, places, target), spans, most=self._threads)
            yield pause

    def release(self) -> None:
        """Forget the rows, and give their memory up."""
        self._memory = self._held = self._refused = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.nbytes if self._memory is not None else 0

    def _rows_of(self, group: Group, key: tuple[Groups, int]) -> Tensor | None:
        """The rows of a group, ascending; None where they are not to be had together."""
        store = self._store
        if key == self._refused or group.rows.size * store.row_nbytes > MOST_BYTES:
            return None
        if self._memory is None or len(self._memory) < group.rows.size:
            self._memory = self._held = None  # the old memory first
            self._memory = self._device.empty((group.rows.size, *store.row_shape), store.dtype)
        rows = self._memory[: group.rows.size]
        if key != self._held:
            self._held = None
            try:
                store._gather(group.rows, rows)
            except Exception as error:
                _log.info(
                    "a group of chunks of %s cannot be read, so its rows are as they are asked for: %s", store.name, error
                )
                self._refused = key
                return None
            self._held = key
        return rows


def _mix(source: Tensor, places: NDArray[np.int64], target: Tensor, span: tuple[int, int]) -> None:
    gather_rows(source, places[span[0] : span[1]], target[span[0] : span[1]])
