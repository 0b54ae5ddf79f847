"""``Pipeline``: the iterator that users hold."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, final

import torch

from rowferry.stores._device_contract import Device

from . import _assembly, _claims
from ._commits import Commits
from ._engine import Host, Inline, Threads
from ._epoch import Epoch, first_here, refuse_capture, refuse_fork
from ._local import LocalConsumer
from ._progress import Progress
from ._requests import Requests
from ._run import Parts
from ._sampling import make_source as make_batches
from ._server import Windowed
from ._serving import Taken
from ._source import make_source
from ._stats import Counters, Stats

logger = logging.getLogger("rowferry")


@final
class Pipeline:
    """Rows of stores, prefetched into batches on a device while the previous ones are used; and written back.

    ``for batch in pipe`` is one epoch; it may be repeated. Batches are exact: each sees every row as if all earlier
    batches had been written back in full before it was read. A batch's tensors are fresh, ready on the stream that is
    current at ``next()``, and never change under you.

    Args:
        source: a store (or a path, a NumPy, torch, CuPy or zarr array), a tuple or a dict of them with equal length; with
            ``index`` a dict, a dict of tables.
        batch_size, shuffle, drop_last, seed: the built-in order. ``shuffle`` is a keyed permutation evaluated by
            position: it costs memory in proportion to a batch, also over a billion rows.
        sampler: an iterable of row numbers, grouped by ``batch_size``.
        batch_sampler: an iterable of index batches, or of any items with ``index``. A list, range, slice, NumPy, torch or
            CuPy array of any integer type and shape, or a bool mask. Its ``iter`` and first ``next`` run in the caller's
            thread, the rest in the producer's.
        index: takes the rows from an item: a key or a callable; or a dict of them by table.
        device: where batches go: the current CUDA device if there is one, else the CPU.
        dtype: casts floating columns, or a dict by column. Rounded once, to nearest even. Stores keep their dtype.
        lookahead: most batches planned and fetched together, "auto" for as many as fit; 0 does everything inside
            ``next()``, without a thread.
        depth: slots; two is double buffering.
        staging_bytes: device memory of all slots; by default the smaller of 2 GiB and a tenth of what is free.
        threads: most host threads that gather rows; by default the cores of the process, at most 16.
        writable: batches have ``rows``, ``inverse``, ``values``, ``write_back()`` instead of ``data``.
        fetch: False hands out rows uninitialised; they must be passed to ``write_back``.
        mover: "auto", "local", "copy" or "zero-copy".

    Raises:
        ValueError, TypeError: the arguments do not fit together. PermissionError: writable over a read-only store.

    Threads: one thread uses a pipeline. It starts a producer (and with ``writable`` a writer) at ``iter()``, which end
    with the epoch.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        index: Any = None,
        seed: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | dict[Any, torch.dtype] | None = None,
        lookahead: int | Literal["auto"] = "auto",
        depth: int = 2,
        staging_bytes: int | None = None,
        threads: int | None = None,
        writable: bool = False,
        fetch: bool = True,
        mover: _assembly.MoverName = "auto",
    ) -> None:
        self._closed, self._pid = False, os.getpid()
        self._source = make_source(source, index, dtype)
        self._index = index
        self._batches = make_batches(
            self._source.tables[0].rows,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            seed=seed,
        )
        if index is not None and batch_sampler is None:
            raise ValueError("index= takes the rows from a batch_sampler's items; pass a batch_sampler, or leave index out")
        self._settings = _assembly.make_settings(lookahead=lookahead, depth=depth, writable=writable, fetch=fetch)
        self._threads = _assembly.thread_count(threads)
        self._device: Device = _assembly.resolve_device_object(device)
        self._counters = Counters()
        self._movers = [_assembly.mover_name(mover, store, self._device) for store in self._source.stores]
        self._new_host: Callable[[], Host] = self._make_host
        self._negative = True  # rows may count from the end; a RowTable's may not
        self._parts: Parts | None = None
        if any(name != "local" for name in self._movers):
            self._parts = _assembly.make_parts(
                self._source,
                self._settings,
                self._device,
                self._counters,
                mover=mover,
                staging_bytes=staging_bytes,
                batch_size=batch_size,
                threads=self._threads,
            )
        self._live: weakref.ref[Epoch] | None = None
        self._progress = Progress(seed)
        self._claim = _claims.claim(self, self._source.stores) if writable else None
        self._commits = Commits(self._source.stores, self._progress, writable=writable)
        logger.info("%s", self)

    def _make_host(self) -> Host:
        return Inline() if self._settings.inline else Threads(self._device, self._threads)

    # ---- iterating ------------------------------------------------------------------------------------------

    def __iter__(self) -> Epoch:
        """Begin the next epoch; a live one ends first, after its writes have landed."""
        self._require_usable()
        live = self._live() if self._live is not None else None
        if live is not None:
            live.supersede()
        epoch, skip, state = self._progress.next_epoch()
        for store in self._source.stores:
            _claims.drain_writer_of(store, self)
        items = self._batches.epoch(epoch, skip, state)
        self._progress.begin()
        if self._parts is not None:  # prefetch starts after what the caller's stream had queued
            here = self._device.record(self._device.current())
            for stream in self._parts.streams.all():
                self._device.wait(stream, here)
        items = self._first_here(items)
        pool = self._parts.pool if self._parts is not None else None
        requests = Requests(items, self._index, self._source, self._device, pool, first=skip, negative=self._negative)
        server: Windowed | LocalConsumer
        if self._parts is None:
            server = LocalConsumer(
                self._device,
                self._source,
                requests,
                self._counters,
                writable=self._settings.writable,
                fetch=self._settings.fetch,
            )
        else:
            server = Windowed(self._parts, self._new_host(), requests)
        live = Epoch(
            server,
            self._source,
            self._device,
            self._counters,
            on_batch=self._served,
            on_write=self._progress.wrote,
            on_end=self._progress.end,
        )
        self._live = weakref.ref(live)
        return live

    def _first_here(self, items: Iterator[Any]) -> Iterator[Any]:
        """The first item is drawn in the caller's thread, with the plan stream current as for the others."""
        if self._settings.inline:
            return items
        if self._parts is None:
            return first_here(items)
        with self._device.use(self._parts.streams.plan):
            return first_here(items)

    def __len__(self) -> int:
        """Batches in an epoch. TypeError when the sampler does not tell."""
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch: with ``shuffle`` its order, else what ``sampler.set_epoch`` is called with."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; it must be an integer from 0")
        self._progress.move_to(epoch)

    def _served(self, taken: Taken) -> None:  # a method, by which a live epoch keeps its pipeline, and so its claim
        self._progress.served(taken.request.number, taken.request.state)

    def _end_live(self, timeout: float | None = None) -> None:
        live = self._live() if self._live is not None else None
        self._live = None
        if live is not None and not live.over:
            live.finish(drain=True, timeout=timeout)

    # ---- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the user is: batches given out, not those prefetched. Small and picklable.

        Raises:
            RuntimeError: rows were written back and ``flush()`` has not returned since.
        """
        return self._progress.save()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next ``iter()`` continues at the saved batch, in the saved order, under any depth or lookahead.

        Raises:
            ValueError: saved under another version or seed.
        """
        self._progress.require_loadable(state)
        self._end_live()
        self._progress.load(state)

    def stats(self) -> Stats:
        """A frozen snapshot of the counters; ``stats().verdict`` is one sentence."""
        parts = self._parts
        held = 0 if parts is None else parts.pool.nbytes + sum(mover.held() for movers in parts.movers for mover in movers)
        return self._counters.snapshot(
            mover=", ".join(dict.fromkeys(self._movers)),
            device=str(self._device.torch),
            bytes_staging=0 if parts is None else parts.arenas.nbytes,
            bytes_pinned=held,
        )

    # ---- writing and ending ---------------------------------------------------------------------------------

    def flush(self, sync: bool = False) -> None:
        """Return when every row written back so far is in its store, and the stores are flushed.

        Stores with ``durability="atomic"`` commit together, with ``state_dict()``, their ``committed_state`` from then on.

        Args:
            sync: survive a crash of the machine, as far as the file system promises (see ``Store.flush``).

        Raises:
            What a store failed with; the rows are kept and the next call tries again.
        """
        self._land()
        self._commits.flush(sync)

    def _land(self) -> None:
        """As ``flush``, for who wants to read behind what was written: no commit, no checkpoint."""
        self._require_usable()
        live = self._live() if self._live is not None else None
        if live is not None:
            live.flush()
        self._commits.land()

    def close(self, timeout: float | None = None) -> None:
        """End the live epoch, draining what was written (at most ``timeout`` seconds), and give up memory. Idempotent."""
        if self._closed:
            return
        refuse_capture(self._device, "close()")
        self._closed = True
        try:
            self._end_live(timeout)
            self._commits.close()
        finally:
            self._parts = None
            if self._claim is not None:
                self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._commits.abandon()
        self.close()

    def __repr__(self) -> str:
        columns = [column for table in self._source.tables for column in table.columns]
        what = ", ".join(
            f"{column.label} ({len(column.store):,} rows of {column.store.row_nbytes:,} bytes)" for column in columns
        )
        way = "read, changed and written back" if self._settings.writable else "read"
        movers = ", ".join(dict.fromkeys(self._movers))
        state = "closed" if self._closed else f"epoch {self._progress.epoch}, batch {self._progress.batch}"
        return f"<Pipeline: {what} {way} on {self._device.torch} by {movers}; {state}; {self.stats().verdict}>"

    def _require_usable(self) -> None:
        refuse_fork(self._pid)
        if self._closed:
            raise RuntimeError("the pipeline is closed; make a new one")
        refuse_capture(self._device, "the pipeline")
