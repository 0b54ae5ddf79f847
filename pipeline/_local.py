"""The mover ``local``: nothing crosses, so there is no window, no slot and no thread.

``next()`` gathers from the store's own memory straight into the user's tensors; ``write_back`` scatters straight back.
All of it on the caller's current stream; a consumer that changes streams is ordered by the last use.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from rowferry.stores._bytes import as_ints
from rowferry.stores._casts import cast
from rowferry.stores._device_contract import Device

from ._containers import map_leaves
from ._counters import Counters
from ._flight import Asked, Request
from ._requests import Requests
from ._run import Settings
from ._serving import Taken, check_values
from ._source import Source, Table


@final
class LocalConsumer:
    """``Consumer`` for stores whose memory the device reads directly. One thread."""

    keeps_open = False

    def __init__(
        self,
        device: Device,
        source: Source,
        requests: Requests,
        counters: Counters,
        settings: Settings,
    ) -> None:
        self._device = device
        self._source = source
        self._requests = requests
        self._counters = counters
        self._writable = settings.writable
        self.fetch = settings.fetch
        self._stream: Any = None
        self._rows: list[Tensor] = []  # of the current batch, by table

    def next(self) -> Taken:
        """The next batch. StopIteration at the end; what the sampler raises."""
        self._enter()
        start = self._device.now()
        requests, _ended, error = self._requests.take(self._stream, 1)
        self._counters.waited("sampler", self._device.now() - start)
        if error is not None:
            raise error
        if not requests:
            raise StopIteration
        request = requests[0]
        self._rows = []
        taken = Taken(None, 0, request, self._item(request))
        for table, asked in zip(self._source.tables, request.asked, strict=True):
            index = self._on_device(asked)
            if self._writable:
                self._serve_distinct(taken, table, asked, index)
            else:
                taken.columns.append(
                    [self._pick(column.store.memory, index, column.dtype, asked.shape) for column in table.columns]
                )
            taken.index.append(functools.partial(index.view, asked.shape))
            self._counters.served(asked.count, asked.count * table.row_nbytes)
        self._counters.batches += 1
        if self._counters.overflow is not None:
            self._counters.overflow.send(self._stream)
        return taken

    def write(self, taken: Taken, values: Mapping[tuple[int, int], Tensor]) -> None:
        """Scatter the current batch's rows, by (table, column), into the stores."""
        del taken
        tables = self._source.tables
        for (table, column), rows in values.items():
            check_values(rows, tables[table].columns[column], len(self._rows[table]), self._device)
        self._enter()
        for (table, column), rows in values.items():
            store = tables[table].columns[column].store
            assert store.memory is not None
            values_there = self._cast(rows.detach(), store.dtype)
            if store.guarded:
                store._scatter(self._rows[table].numpy(), values_there.contiguous())
            else:
                as_ints(store.memory).index_copy_(0, self._rows[table], as_ints(values_there))
            self._device.keep(rows.detach(), self._stream)
        if self._counters.overflow is not None:
            self._counters.overflow.send(self._stream)

    def flush(self) -> None:
        """Wait until what was written is in the store's memory."""
        if self._stream is not None:
            self._device.record(self._stream).synchronize()

    def plan_bytes(self) -> int:
        """There are no plans."""
        return 0

    def finish(self, *, drain: bool, timeout: float | None = None) -> None:
        """Nothing is on its way: nothing to end."""
        del drain, timeout

    def _serve_distinct(self, taken: Taken, table: Table, asked: Asked, index: Tensor) -> None:
        rows, inverse = torch.unique(index, sorted=True, return_inverse=True)
        self._rows.append(rows)
        taken.rows.append(rows.clone())
        taken.inverse.append(inverse.view(asked.shape))
        columns = []
        for column in table.columns:
            if self.fetch:
                columns.append(self._pick(column.store.memory, rows, column.store.dtype, tuple(rows.shape)))
            else:
                columns.append(self._device.empty((len(rows), *column.store.row_shape), column.store.dtype))
        taken.columns.append(columns)

    def _pick(self, memory: Tensor | None, index: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        assert memory is not None
        rows = as_ints(memory).index_select(0, index).view(memory.dtype)
        rows = self._cast(rows, dtype)
        return rows.view(*shape, *memory.shape[1:])

    def _cast(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == dtype:
            return rows
        result = cast(rows, dtype)
        if self._counters.overflow is not None:
            self._counters.overflow.add(rows, result)
        return result

    def _on_device(self, asked: Asked) -> Tensor:
        """The rows as a tensor of our own."""
        if asked.device is not None:
            return asked.device
        if asked.positions is not None:
            return torch.from_numpy(asked.positions.rows()).to(self._device.torch)
        return torch.tensor(asked.host, device=self._device.torch)

    def _item(self, request: Request) -> Any:
        if not request.walk or not self._device.asynchronous:
            return request.item
        target = self._device.torch
        return map_leaves(request.item, lambda leaf: leaf.to(target, non_blocking=True) if hasattr(leaf, "to") else leaf)

    def _enter(self) -> None:
        current = self._device.current()
        if self._stream is not None and current != self._stream:
            self._device.wait(current, self._device.record(self._stream))
        self._stream = current
