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

from ._containers import map_leaves
from ._flight import Asked, Request
from ._ids import Snapshots, id_dtype
from ._sampling import Positions, StatefulItem, rows_of
from ._source import Source, Table
from ._staging import PinnedPool

TOGETHER = 1 << 14  # ids; batches smaller than this are checked and copied together


def _is_plain(item: Any) -> bool:
    return type(item) is np.ndarray and item.ndim == 1 and item.dtype.kind in "iu"


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
        self._negative = negative

    def take(self, stream: Any, wanted: int) -> tuple[list[Request], bool, Exception | None]:
        """Up to ``wanted`` next batches; whether the sampler has ended; what it, or a bad index, failed with after them.

        ``stream`` is current while the sampler runs.
        """
        drawn: list[Any] = []
        error: Exception | None = None
        with self._device.use(stream):
            try:
                for entry in itertools.islice(self._items, wanted):  # keeps what came before an error
                    drawn.append(entry)
            except Exception as failed:
                error = failed
            ended = error is None and len(drawn) < wanted
            requests = self._plain(drawn)
            if requests is None:
                requests = []
                try:
                    for entry in drawn:
                        requests.append(self._request(entry, stream))
                except Exception as failed:
                    return requests, False, failed
            return requests, ended, error

    def _request(self, entry: StatefulItem, stream: Any) -> Request:
        number, self._number = self._number, self._number + 1
        item = entry.item
        if isinstance(item, Positions):
            return Request(number, None, (Asked((len(item),), len(item), None, positions=item),), entry.state)
        asked = self._asked(item, number)
        pinned: list[Tensor] = []
        walk = self._index is not None or isinstance(item, Tensor)  # else the item is the index: not a call a row
        staged = map_leaves(item, lambda leaf: self._stage(leaf, pinned)) if walk and self._stages else item
        taken = self._device.record(stream) if walk and self._stages else None
        return Request(number, staged, asked, entry.state, pinned, taken, walk)

    def _plain(self, drawn: list[StatefulItem]) -> list[Request] | None:
        """Batches that are all simple arrays of rows in range, checked and copied together; None when they are not.

        Few long calls: each call that gives up the GIL for a moment costs a small batch more than its own work.
        """
        arrays = [entry.item for entry in drawn]
        simple = self._index is None and self._snapshots is not None and len(arrays) > 1
        if not simple or not all(
            type(array) is np.ndarray and array.ndim == 1 and array.dtype.kind in "iu" for array in arrays
        ):
            return None
        assert self._snapshots is not None
        rows = self._source.tables[0].rows
        ends = list(itertools.accumulate(map(len, arrays)))
        if not ends[-1]:
            return None
        whole = np.concatenate(arrays, casting="unsafe", dtype=np.int64) if ends[-1] < TOGETHER * len(arrays) else None
        if not all(map(self._in_range, arrays if whole is None else [whole])):
            return None  # negative or out of range: one by one, so that the error names its batch
        snapshot = self._snapshots.empty(ends[-1], id_dtype(rows), uses=len(arrays))
        ids = snapshot.ids.numpy()
        if whole is not None:
            ids[:] = whole
        requests = []
        for entry, start, stop in zip(drawn, (0, *ends), ends, strict=False):
            if whole is None:
                ids[start:stop] = entry.item
            asked = Asked((stop - start,), stop - start, ids[start:stop], snapshot=snapshot, start=start)
            requests.append(Request(self._number, entry.item, (asked,), entry.state))
            self._number += 1
        return requests

    def _in_range(self, ids: NDArray[Any]) -> bool:
        return not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < self._source.tables[0].rows)

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
        snapshot = self._snapshots.empty(rows.size, id_dtype(table.rows))
        host = snapshot.ids.numpy()
        host[:] = rows
        return Asked(shape, rows.size, host, snapshot=snapshot)

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
