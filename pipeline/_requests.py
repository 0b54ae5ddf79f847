"""Takes index batches from the sampler, checks them, and gets the item's tensors ready to travel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores._device_contract import Device
from rowferry.stores._rows import check_index

from ._chunk_order import Mixed
from ._containers import map_leaves
from ._flight import Asked, Request
from ._ids import Snapshots
from ._sampling import Positions, StatefulItem, rows_of
from ._source import Source, Table
from ._staging import PinnedPool

TOGETHER = 1 << 14  # ids; batches of fewer are checked and pinned together


@final
class _SmallBatches:
    """Plain arrays of a few ids, copied one after the other as they are drawn.

    Few long calls afterwards: each call that gives up the GIL for a moment costs a small batch more than its own work.
    """

    def __init__(self) -> None:
        self._entries: list[StatefulItem] = []
        self._ends: list[int] = []
        self._ids = np.empty(0, np.int64)

    def add(self, entry: StatefulItem) -> bool:
        """Copy the entry's array; False when it is something else, or large enough to be worth calls of its own."""
        item = entry.item
        if type(item) is not np.ndarray or item.ndim != 1 or item.dtype.kind not in "iu" or item.size >= TOGETHER:
            return False
        start = self._ends[-1] if self._ends else 0
        stop = start + item.size
        if stop > self._ids.size:
            grown = np.empty(max(2 * stop, TOGETHER), np.int64)
            grown[:start] = self._ids[:start]
            self._ids = grown
        if item.dtype == np.int64 and item.flags.c_contiguous:
            # Not by NumPy: it gives up the GIL for this, and to get it back takes longer than the copy.
            self._ids.view(np.uint8).data[8 * start : 8 * stop] = item.view(np.uint8).data
        else:
            np.copyto(self._ids[start:stop], item, casting="unsafe")  # uint64 past int64 turns negative, and is refused
        self._entries.append(entry)
        self._ends.append(stop)
        return True

    def take(self) -> tuple[list[StatefulItem], list[int], NDArray[np.int64]]:
        """What was added since the last call: entries, where the ids of each end, and the ids."""
        entries, ends = self._entries, self._ends
        self._entries, self._ends = [], []
        return entries, ends, self._ids[: ends[-1]] if ends else self._ids[:0]


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
        self._snapshots = Snapshots(device, pool) if pool is not None else None
        self._number = first
        self._expected = 1  # batches that the present call still wants
        self._negative = negative

    def take(self, stream: Any, wanted: int) -> tuple[list[Request], bool, Exception | None]:
        """Up to ``wanted`` next batches; whether the sampler has ended; what it, or a bad index, failed with after them.

        ``stream`` is current while the sampler runs. An array is copied when it is drawn: the sampler may change it then.
        """
        requests: list[Request] = []
        small = _SmallBatches()
        error: Exception | None = None
        drawn = 0
        with self._device.use(stream):
            try:
                for entry in itertools.islice(self._items, wanted):
                    self._expected = wanted - drawn
                    drawn += 1
                    if self._snapshots is not None and self._index is None and small.add(entry):
                        continue
                    self._close(small, requests)
                    requests.append(self._request(entry, entry.item))
            except Exception as failed:
                error = failed
            try:
                self._close(small, requests)
            except Exception as failed:  # of a batch before the one that failed above
                error = failed
        if self._snapshots is not None:
            self._snapshots.seal()
        return requests, error is None and drawn < wanted, error

    def _request(self, entry: StatefulItem, ids: Any) -> Request:
        """One batch. ``ids`` is the item, or a copy of it where that is a small array.

        What the sampler launched for the item is on the plan stream, before the plan: a batch is served after that.
        """
        number, self._number = self._number, self._number + 1
        item = entry.item
        if isinstance(item, Positions | Mixed):
            return Request(number, None, (Asked((len(item),), len(item), None, positions=item),), entry.state)
        asked = self._asked(ids, number)
        pinned: list[Tensor] = []
        walk = self._index is not None or isinstance(item, Tensor)  # else the item is the index: not a call a row
        staged = map_leaves(item, lambda leaf: self._stage(leaf, pinned)) if walk and self._snapshots is not None else item
        return Request(number, staged, asked, entry.state, pinned, walk)

    def _close(self, small: _SmallBatches, requests: list[Request]) -> None:
        """Check the small batches drawn so far together, and pin their ids in one piece."""
        entries, ends, ids = small.take()
        if not entries:
            return
        rows = self._source.tables[0].rows
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            for entry, start, stop in zip(entries, (0, *ends), ends, strict=False):  # so that the error names its batch
                requests.append(self._request(entry, ids[start:stop]))
            return
        assert self._snapshots is not None
        snapshot, first = self._snapshots.room(self._source.tables[0], ids.size)
        host = snapshot.host[first : first + ids.size]
        host[:] = ids
        snapshot.uses += len(entries) - 1
        for entry, start, stop in zip(entries, (0, *ends), ends, strict=False):
            asked = Asked((stop - start,), stop - start, host[start:stop], snapshot=snapshot, start=first + start)
            requests.append(Request(self._number, entry.item, (asked,), entry.state))
            self._number += 1

    def done(self, request: Request) -> None:
        """The window of ``request`` is on its way: its ids are on the device, and the host's copies may be used again."""
        for asked in request.asked:
            if asked.snapshot is not None and self._snapshots is not None:
                self._snapshots.give(asked.snapshot)
            asked.host = asked.device = asked.positions = asked.snapshot = None

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
        snapshot, start = self._snapshots.room(table, rows.size, self._expected)
        host = snapshot.host[start : start + rows.size]
        host[:] = rows
        return Asked(shape, rows.size, host, snapshot=snapshot, start=start)

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
        """A host tensor of an item as it is now, in pinned memory for a copy that does not block; other leaves unchanged."""
        if not isinstance(leaf, Tensor) or not leaf.is_cpu or leaf.layout != torch.strided or leaf.is_quantized:
            return leaf
        if self._stages and self._device.holds(leaf):
            return leaf
        assert self._pool is not None
        if leaf.numel() == 0 or not self._device.asynchronous:
            return leaf.clone()
        view, buffer = self._pool.upload(leaf.detach().contiguous())
        pinned.append(buffer)
        return view
