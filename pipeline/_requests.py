"""Takes index batches from the sampler, checks them, and gets the item's tensors ready to travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from rowferry.stores._device_contract import Device
from rowferry.stores._rows import check_index

from ._containers import map_leaves
from ._flight import Asked, Request
from ._ids import Snapshots
from ._sampling import Positions, StatefulItem, rows_of
from ._source import Source, Table
from ._staging import PinnedPool

INDEX_LIMIT = 2**31  # tables below it are addressed by int32: half the bytes across the link


@final
class Requests:
    """The epoch's batches, one ``take`` each. One thread at a time; ``stream`` is current while the sampler runs.

    Args:
        items: the epoch's items, from ``BatchSource.epoch``.
        index: the pipeline's ``index=``.
        first: number of the first batch (after a resume).
        negative: whether negative rows count from the end.
    """

    def __init__(
        self,
        items: Iterator[Any],
        index: Any,
        source: Source,
        device: Device,
        pool: PinnedPool | None,
        *,
        first: int,
        negative: bool,
    ) -> None:
        self._items = items
        self._index = index
        self._source = source
        self._device = device
        self._pool = pool
        self._stages = pool is not None and device.asynchronous
        self._snapshots = Snapshots() if pool is not None else None
        self._number = first
        self._negative = negative

    def take(self, stream: Any) -> Request | None:
        """The next batch; None at the end. Raises what the sampler raises, and IndexError or TypeError for a bad index."""
        with self._device.use(stream):
            try:
                item = next(self._items)
            except StopIteration:
                return None
            number, self._number = self._number, self._number + 1
            state = None
            if isinstance(item, StatefulItem):
                item, state = item.item, item.state
            if isinstance(item, Positions):
                return Request(number, None, (Asked((len(item),), len(item), None, positions=item),), state)
            asked = self._asked(item, number)
            pinned: list[Tensor] = []
            walk = self._index is not None or isinstance(item, Tensor)  # else the item is the index: not a call a row
            staged = map_leaves(item, lambda leaf: self._stage(leaf, pinned)) if walk and self._stages else item
            taken = self._device.record(stream) if walk and self._stages else None
            return Request(number, staged, asked, state, pinned, taken, walk)

    def done(self, request: Request) -> None:
        """The window of ``request`` is on its way: its ids are on the device, and the host's copies may be used again."""
        for asked in request.asked:
            if asked.host is not None and self._snapshots is not None:
                self._snapshots.give(asked.host)
            asked.host = asked.device = asked.positions = None

    def _asked(self, item: Any, number: int) -> tuple[Asked, ...]:
        found = rows_of(item, self._index, number)
        per_table = [found[table.name] for table in self._source.tables] if isinstance(self._index, Mapping) else [found]
        return tuple(self._checked(index, table, number) for index, table in zip(per_table, self._source.tables, strict=True))

    def _checked(self, index: Any, table: Table, number: int) -> Asked:
        name = f"{table.name} of batch {number}" if self._source.several else f"batch {number}"
        if isinstance(index, Tensor) and index.is_cuda and index.dtype != torch.bool:
            return self._checked_on_device(index, table, name)
        rows, shape = check_index(index, table.rows, name, negative=self._negative)
        if self._snapshots is None:
            return Asked(shape, rows.size, rows)
        # The caller may change its array as soon as we have returned to it.
        return Asked(shape, rows.size, self._snapshots.of(rows, np.dtype(np.int32 if table.rows < INDEX_LIMIT else np.int64)))

    def _checked_on_device(self, index: Tensor, table: Table, name: str) -> Asked:
        if index.dtype.is_floating_point or index.dtype.is_complex:
            raise TypeError(
                f"index for {name} is of {index.dtype}; row numbers must be integers, or a bool mask of length {table.rows}"
            )
        flat = index.detach().to(device=self._device.torch, dtype=torch.int64).reshape(-1)
        if flat.numel():
            low, high = (int(bound) for bound in torch.stack(torch.aminmax(flat)).tolist())  # waits for the plan stream alone
            least = -table.rows if self._negative else 0
            if low < least or high >= table.rows:
                bad = high if high >= table.rows else low
                raise IndexError(
                    f"row {bad} is out of range for {name} with {table.rows} rows (allowed: {least} to {table.rows - 1})"
                )
            flat = torch.where(flat < 0, flat + table.rows, flat) if low < 0 else flat.clone()
        return Asked(tuple(index.shape), flat.numel(), None, flat)

    def _stage(self, leaf: Any, pinned: list[Tensor]) -> Any:
        """A host tensor of an item as pinned memory, for a copy that does not block; other leaves unchanged."""
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.layout != torch.strided or leaf.is_quantized:
            return leaf
        assert self._pool is not None
        if leaf.numel() == 0:
            return leaf.clone()
        view, buffer = self._pool.upload(leaf.detach().contiguous())
        pinned.append(buffer)
        return view
