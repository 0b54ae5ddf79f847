"""One live epoch: the iterator behind ``iter(pipe)``. It turns what a server serves into the user's batches."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor

from rowferry.stores._device_contract import Device

from ._batch import Batch, WritableBatch, spread
from ._counters import Counters
from ._server import Server, Windowed
from ._serving import Taken
from ._source import Source

logger = logging.getLogger("rowferry")

ABANDON_SECONDS = 5.0  # a finalizer waits this long for writes to land


@final
class Epoch(Iterator[Any]):
    """What ``iter(pipe)`` gives. One thread uses it. Dropped, closed or at its end it stops its threads."""

    def __init__(
        self,
        server: Server,
        source: Source,
        device: Device,
        counters: Counters,
        *,
        on_batch: Callable[[Taken], None],
        on_write: Callable[[], None],
        on_end: Callable[[], None],
        on_over: Callable[[], None],
    ) -> None:
        self._server: Server | None = server  # None when over: a batch that is kept must not keep slots alive
        self._source = source
        self._names = [table.name for table in source.tables] if source.several else None
        self._device = device
        self._counters = counters
        self._on_batch, self._on_write, self._on_end, self._on_over = on_batch, on_write, on_end, on_over
        self._taken: Taken | None = None
        self._pid = os.getpid()
        self._over = False
        self._superseded = False
        self._finalizer = weakref.finalize(self, _abandon, server, counters, on_over)
        counters.epoch_begins()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:  # a Batch, or of a writable pipeline a WritableBatch
        if self._over:
            if self._superseded:
                raise RuntimeError(
                    "a later iter() of the same pipeline ended this iterator; make a second pipeline to read twice at once"
                )
            raise StopIteration
        refuse_fork(self._pid)
        refuse_capture(self._device, "next()")
        self._taken = None
        assert self._server is not None
        try:
            taken = self._server.next()
        except StopIteration:
            self._on_end()
            self.finish(drain=True)
            raise
        except BaseException:
            if not self._server.keeps_open:
                self.finish(drain=True)
            raise
        self._taken = taken
        self._on_batch(taken)
        return self._batch(taken)

    def flush(self) -> None:
        """All that was written is in the stores' own keeping when this returns."""
        if self._server is not None:
            self._server.flush()

    def supersede(self) -> None:
        """A later iterator takes over."""
        if not self._over:
            self._superseded = True
            self.finish(drain=True)

    def finish(self, *, drain: bool, timeout: float | None = None) -> None:
        """End the epoch; idempotent."""
        server = self._server
        if server is None or self._over:
            return
        self._over = True
        self._taken = None
        self._finalizer.detach()
        try:
            server.finish(drain=drain, timeout=timeout)
        finally:
            self._server = None
            self._counters.epoch_ends()
            self._on_over()

    @property
    def server(self) -> Server | None:
        """What serves its batches; None when it is over."""
        return self._server

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._over

    def _batch(self, taken: Taken) -> Batch | WritableBatch:
        source, number = self._source, taken.request.number
        indices, item = functools.partial(_looked_at, self._device, self._names, taken.index), taken.item
        values = source.build([table.build(columns) for table, columns in zip(source.tables, taken.columns, strict=True)])
        if not taken.rows:
            return Batch(number, indices, item, values)
        return WritableBatch(
            number,
            indices,
            item,
            rows=source.build(taken.rows),
            inverse=source.build(taken.inverse),
            values=values,
            lookup=self._lookup,
            write=lambda batch, changed: self._write(number, batch, changed),
        )

    def _lookup(self, batch: WritableBatch) -> Any:
        found, overflow = [], self._counters.overflow
        for table in self._source.tables:
            values = batch.values[table.name] if self._source.several else batch.values
            inverse = batch.inverse[table.name] if self._source.several else batch.inverse
            named = table.named(values)
            columns = [spread(named[number], inverse, column.dtype, overflow) for number, column in enumerate(table.columns)]
            found.append(table.build(columns))
        return self._source.build(found)

    def _write(self, number: int, batch: WritableBatch, changed: Any) -> None:
        taken, server = self._taken, self._server
        if taken is None or server is None or taken.request.number != number:
            raise RuntimeError(
                f"batch {number} cannot be written back any more: a later batch was taken, or its epoch ended. "
                "Call write_back() before the next next(); a wrapper that fetches one batch ahead (accelerate, "
                "Lightning's prefetching) must be turned off for a writable pipeline"
            )
        if changed is None and not server.fetch:
            raise ValueError("with fetch=False the batch's values are uninitialised: pass the new ones to write_back(values)")
        refuse_capture(self._device, "write_back()")
        changed = batch.values if changed is None else changed
        per_table = self._per_table(changed)
        values = {
            (table, column): rows
            for table, table_values in per_table.items()
            for column, rows in self._source.tables[table].named(table_values).items()
        }
        server.write(taken, values)
        self._on_write()

    def _per_table(self, changed: Any) -> dict[int, Any]:
        if not self._source.several:
            return {0: changed}
        numbers = {table.name: number for number, table in enumerate(self._source.tables)}
        unknown = [name for name in changed if name not in numbers]
        if unknown:
            raise KeyError(f"source has no table {unknown[0]!r}; it has {', '.join(map(repr, numbers))}")
        return {numbers[name]: values for name, values in changed.items()}


def _looked_at(device: Device, names: Sequence[str] | None, index: Sequence[Callable[[], Tensor]]) -> Any:
    """The rows that a batch asked for, by table where these have names. Without the source, whose stores it would keep."""
    refuse_capture(device, "the first look at batch.index")
    found = [rows() for rows in index]
    return found[0] if names is None else dict(zip(names, found, strict=True))


def refuse_fork(pid: int) -> None:
    """Raise RuntimeError in a child that was forked from ``pid``."""
    if os.getpid() != pid:
        raise RuntimeError(
            "a pipeline cannot be used in a forked child: threads and CUDA do not survive a fork; start workers with the "
            "'spawn' method and make the pipeline there"
        )


def refuse_capture(device: Device, call: str) -> None:
    """Raise RuntimeError while the current stream is captured: a graph cannot hold what a pipeline does."""
    if device.capturing():
        raise RuntimeError(
            f"{call} was called while the current stream is captured into a graph; call it outside the capture, and copy "
            "batches into the graph's static inputs"
        )


def first_here(items: Iterator[Any], using: AbstractContextManager[Any]) -> Iterator[Any]:
    """``items``, the first one drawn now, in the caller's thread and ``using``; an error of it rises when it is asked for."""
    try:
        with using:
            first = next(items)
    except StopIteration:
        return iter(())
    except Exception as error:
        return _raising(error)
    return itertools.chain((first,), items)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _abandon(server: Server, counters: Counters, on_over: Callable[[], None]) -> None:
    """The iterator was dropped: reading stops, what was written is drained where that is possible."""
    if isinstance(server, Windowed) and server.run.parts.pid != os.getpid():
        return  # a forked child must not touch its parent's device
    try:
        server.finish(drain=True, timeout=ABANDON_SECONDS)
    except Exception:
        logger.exception("changed rows were lost when the iterator was dropped")
    counters.epoch_ends()
    on_over()
