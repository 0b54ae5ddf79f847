"""``Pipeline``: the iterator that users hold."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Literal, Self, final

import torch

from rowferry.stores._device_contract import Device

from . import _assembly, _candidates, _chunk_shuffle, _claims
from ._account import Account
from ._commits import Commits
from ._counters import Counters
from ._engine import Host, Inline, Threads
from ._epoch import Epoch, first_here, refuse_capture, refuse_fork
from ._local import LocalConsumer
from ._overflow import Overflow
from ._progress import Progress
from ._requests import Requests
from ._run import Parts
from ._server import Windowed, close_opened, wait_for_abandoned
from ._serving import Taken
from ._source import make_source
from ._stats import Stats

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
            position: it costs memory in proportion to a batch, also over a billion rows. ``"chunks"`` takes the chunks
            of a file in random order and mixes the rows of ``shuffle_chunks`` of them, so that each is read once.
        shuffle_chunks: "auto" for chunks of about 32 MiB together, at least 8. Chunks of less than 1 MiB count together.
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
        staging_bytes: device memory of all slots; by default the smaller of 2 GiB and a tenth of what is free, 64 MiB where
            files are read in order or by chunks, and less for tables that need less.
        threads: most host threads that gather rows; by default the cores of the process, at most 16.
        writable: batches have ``rows``, ``inverse``, ``values``, ``write_back()`` instead of ``data``.
        fetch: False hands out rows uninitialised; they must be passed to ``write_back``.
        mover: "auto" measures those that are possible on the first windows; "local", "copy" or "zero-copy" is taken as it is.
        count_inf: count finite values that a cast makes infinite (``stats().values_made_inf``). It reads cast values again.

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
        shuffle: _chunk_shuffle.Shuffle = False,
        shuffle_chunks: int | Literal["auto"] = "auto",
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
        mover: _candidates.MoverName = "auto",
        count_inf: bool = False,
    ) -> None:
        self._closed, self._pid = False, os.getpid()
        self._source, self._index = make_source(source, index, dtype), index
        self._batches = _chunk_shuffle.make_batches(
            self._source, index, batch_size, shuffle, shuffle_chunks, drop_last, sampler, batch_sampler, seed
        )
        self._settings = _assembly.make_settings(lookahead=lookahead, depth=depth, writable=writable, fetch=fetch)
        self._threads = _assembly.thread_count(threads)
        staging_bytes = _chunk_shuffle.staging(self._batches, self._source, self._settings.depth, staging_bytes)
        self._place: Device = _assembly.resolve_device_object(device)  # not `_device`, which fastai takes for a torch.device
        self._counters = Counters(self._place.now, Overflow(self._place) if count_inf else None)
        self._new_host: Callable[[], Host] = self._make_host
        self._negative = True  # rows may count from the end; a RowTable's may not
        self._ways = _candidates.LOCAL
        self._parts: Parts | None = None
        if not _candidates.is_all_local(mover, self._source, self._place):
            self._parts = _assembly.make_parts(
                self._source, self._settings, self._place, self._counters,
                mover=mover, staging_bytes=staging_bytes, batch_size=batch_size, threads=self._threads, batches=self._batches,
            )  # fmt: skip
            _chunk_shuffle.warn_if_dear(self._batches, self._parts)
        self._account = Account(self._place, self._counters, self._parts)
        self._live: weakref.ref[Epoch] | None = None
        self._progress = Progress(seed)
        self._claim = _claims.claim(self, self._source.stores) if writable else None
        self._commits = Commits(self._source.stores, self._progress, writable=writable)
        logger.info("%s", self)

    def _make_host(self) -> Host:
        return Inline() if self._settings.inline else Threads(self._place, self._threads)

    # ---- iterating ------------------------------------------------------------------------------------------

    def __iter__(self) -> Epoch:
        """Begin the next epoch; a live one ends first, after its writes have landed.

        An epoch that gave out no batch is not over: it begins again.
        """
        self._require_usable()
        live = self._live() if self._live is not None else None
        if live is not None:
            live.supersede()
        if self._parts is not None:
            wait_for_abandoned(self._parts)
        epoch, skip, state = self._progress.next_epoch()
        for store in self._source.stores:
            _claims.drain_writer_of(store, self)
            store._settle()  # from here on the pipeline's own events order who uses its memory
        items = self._batches.epoch(epoch, skip, state)
        self._progress.begin()
        if self._parts is not None:
            self._parts.follow_caller()
        if not self._settings.inline:  # with the plan stream current as for the others
            items = first_here(items, nullcontext() if self._parts is None else self._place.use(self._parts.streams.plan))
        pool = self._parts.pool if self._parts is not None else None
        requests = Requests(items, self._index, self._source, self._place, pool, first=skip, negative=self._negative)
        server: Windowed | LocalConsumer
        if self._parts is None:
            server = LocalConsumer(self._place, self._source, requests, self._counters, self._settings)
        else:
            server = Windowed(self._parts, self._new_host(), requests)
        live = Epoch(
            server,
            self._source,
            self._place,
            self._counters,
            on_batch=self._served,
            on_write=self._progress.wrote,
            on_end=self._progress.end,
            on_over=functools.partial(self._epoch_over, epoch, self.stats()),
        )
        self._live = weakref.ref(live)
        return live

    def __len__(self) -> int:
        """Batches in an epoch. TypeError when the sampler does not tell."""
        return len(self._batches)

    @property
    def device(self) -> torch.device:
        """Where batches are; as ``torch.device``, since trainers ask their loaders."""
        return self._place.torch

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch: with ``shuffle`` its order, else what ``sampler.set_epoch`` is called with."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; it must be an integer from 0")
        self._progress.move_to(epoch)

    def _served(self, taken: Taken) -> None:  # a method, by which a live epoch keeps its pipeline, and so its claim
        self._progress.served(taken.request.number, taken.request.state)

    def _epoch_over(self, epoch: int, before: Stats) -> None:
        logger.info("epoch %d: %s", epoch, self.stats().since(before).verdict)

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
        live = self._live() if self._live is not None else None
        if self._parts is not None:
            self._ways = _candidates.ways(self._source, self._parts.movers)
        names, why = self._ways
        return self._account.stats(live.server if live is not None else None, mover=names, mover_why=why)

    def trace(self, path: str | os.PathLike[str], steps: int = 64) -> None:
        """Draw the next ``steps`` batches: who worked and who waited for what, on which thread and stream, in a file.

        Chrome's trace format: open it at https://ui.perfetto.dev, or draw it by ``rowferry trace``. Returns at once. The
        file is written by a later ``next()``, when what those steps started has passed, or at the end of the epoch.

        Raises:
            RuntimeError: another trace is under way, or the mover is ``local``. ValueError, TypeError, OSError: bad arguments.
        """
        self._require_usable()
        self._account.trace(path, steps)

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
        refuse_capture(self._place, "close()")
        self._closed = True
        try:
            self._end_live(timeout)
            self._commits.close()
        finally:
            self.stats()  # which remembers how rows crossed
            self._account.close()
            close_opened(self._source, self._parts)
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
        way = "read, changed and written back" if self._settings.writable else "read"
        stats = self.stats()
        state = "closed" if self._closed else f"epoch {self._progress.epoch}, batch {self._progress.batch}"
        return f"<Pipeline: {self._source} {way} on {stats.device} by {stats.mover}; {state}; {stats.verdict}>"

    def _require_usable(self) -> None:
        refuse_fork(self._pid)
        if self._closed:
            raise RuntimeError("the pipeline is closed; make a new one")
        refuse_capture(self._place, "the pipeline")
