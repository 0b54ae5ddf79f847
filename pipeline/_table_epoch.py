"""From a pipeline's batches to those of tables: each row gets its leaf, its state, and its place in the optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypedDict, final

import torch
from torch import Tensor

from rowferry.stores._casts import cast

from ._candidates import MoverName, go_on
from ._stats import Stats
from ._table_batch import LookupBatch, Put, TableBatch, TablesBatch, grown, rounded_up
from ._table_core import Core
from ._table_padding import Ids, PaddedItem, Wrapped, spread_over, wrapped_index
from ._table_resume import committed_tables
from .loader import Pipeline

ONLY = ""  # the name of a table that has no others beside it


class Moving(TypedDict, total=False):
    """The Pipeline's keywords that a table hands on: where batches come from, and how rows move."""

    batch_size: int | None
    shuffle: bool
    drop_last: bool
    sampler: Any
    seed: int
    lookahead: Any
    depth: int
    staging_bytes: int | None
    threads: int | None
    mover: MoverName
    count_inf: bool


@final
class TableBatches:
    """An epoch of batches each time it is iterated. Made by ``RowTable.batches`` and ``RowTables.batches``.

    One thread uses it. With ``with``, or ``close()``, it ends: what was written has landed then.
    """

    def __init__(
        self,
        cores: Mapping[str, Core],
        items: Any,
        index: Any,
        *,
        train: bool,
        pad_rows: int,
        device: torch.device,
        moving: Moving,
    ) -> None:
        self._cores = dict(cores)
        self._several = ONLY not in cores
        self._train, self._pad_rows = train, pad_rows
        if any(core.padding is not None for core in cores.values()):
            if items is None:
                raise ValueError("padding ids come in index batches: pass them, not batch_size=, shuffle= or sampler= alone")
            if not hasattr(items, "__iter__"):
                raise TypeError(f"batches takes an iterable of index batches or items, not a {type(items).__name__}")
            allowed = {name: Ids(len(core.weights), core.padding) for name, core in cores.items()}
            items, index = Wrapped(items), wrapped_index(index, allowed, several=self._several)
        if train:
            for core in cores.values():
                core.begin_training()
        source: dict[str, Any] = {name: core.stores() if train else core.weights for name, core in cores.items()}
        self._pipe = Pipeline(
            source if self._several else source[ONLY],
            batch_sampler=items,
            index=index,
            device=device,
            writable=train,
            **moving,
        )
        self._pipe._negative = False
        if self._pipe._parts is not None:
            movers = self._pipe._parts.movers
            for core, mine in zip(cores.values(), movers, strict=True):
                core.learnt[train] = go_on([mine], core.learnt.get(train))
        if train:
            for core in cores.values():
                core.writes_through(self._pipe)
            self._pipe._commits.more_state = lambda: committed_tables(cores.values())

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch; a live one ends first, after its writes have landed."""
        self._release()
        return _Epoch(iter(self._pipe), self._release, self._batch)

    def __len__(self) -> int:
        """Batches in an epoch. TypeError when the sampler does not tell."""
        return len(self._pipe)

    def set_epoch(self, epoch: int) -> None:
        """See ``Pipeline.set_epoch``."""
        self._pipe.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the user is in the order of batches; see ``Pipeline.state_dict``. Rows are in ``RowTable.save``."""
        return self._pipe.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Pipeline.load_state_dict``."""
        self._pipe.load_state_dict(state)

    def stats(self) -> Stats:
        """See ``Pipeline.stats``."""
        return self._pipe.stats()

    def trace(self, path: str | os.PathLike[str], steps: int = 64) -> None:
        """See ``Pipeline.trace``."""
        self._pipe.trace(path, steps)

    def close(self, timeout: float | None = None) -> None:
        """End the live epoch with all that was written landed, and give up memory. Idempotent."""
        self._release()
        self._pipe.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._pipe._commits.abandon()
        self.close()

    def __repr__(self) -> str:
        return f"<TableBatches of {self._pipe!r}>"

    # ---- one batch ------------------------------------------------------------------------------------------

    def _release(self) -> None:
        if self._train:
            for core in self._cores.values():
                core.release(self._pipe)

    def _batch(self, raw: Any) -> Any:
        item, kept = raw.item, {}
        if isinstance(item, PaddedItem):
            item, kept = item.item, item.kept

        def put(values: dict[str, dict[str, Tensor]]) -> None:
            raw.write_back(values if self._several else values[ONLY])

        def of(what: Any, name: str) -> Any:
            return what[name] if self._several else what

        parts: dict[str, TableBatch | LookupBatch] = {}
        with torch.inference_mode(False):
            for name, core in self._cores.items():
                where = kept.get(name)
                index = of(raw.index, name)
                if where is not None:
                    index = spread_over(where, index, _padding_of(core))
                if self._train:
                    rows, inverse, values = of(raw.rows, name), of(raw.inverse, name), of(raw.values, name)
                    leaf = _Leaf(core, rows, inverse, values, where, self._pad_rows)
                    parts[name] = leaf.batch(name, raw.number, index, item, put)
                else:
                    found = of(raw.data, name)
                    found = cast(found if where is None else spread_over(where, found, 0), core.weight_dtype)
                    parts[name] = LookupBatch(raw.number, index, item, found, core.dtype, self._pad_rows)
        return TablesBatch(raw.number, item, parts, put) if self._several else parts[ONLY]


@final
class _Epoch(Iterator[Any]):
    """One live epoch. Before each ``next`` the batch before is unbound, whether it was written back or not."""

    def __init__(self, batches: Iterator[Any], release: Callable[[], None], build: Callable[[Any], Any]) -> None:
        self._batches, self._release, self._build = batches, release, build

    def __next__(self) -> Any:
        self._release()
        return self._build(next(self._batches))


@final
class _Leaf:
    """The rows of one table in one batch, as a leaf that is bound into the optimizer."""

    def __init__(
        self, core: Core, rows: Tensor, inverse: Tensor, values: dict[str, Tensor], kept: Tensor | None, pad_rows: int
    ) -> None:
        self._core = core
        self._real = total = len(rows)
        if kept is not None:
            inverse = spread_over(kept, inverse, self._real)
            total += 1
            longer = rows.new_full((total,), _padding_of(core))
            longer[: self._real] = rows
            rows = longer
        self._rows, self._inverse = rows, inverse
        size = rounded_up(total, pad_rows)
        self._weight = grown(values["weight"], size, core.weight_dtype).detach().requires_grad_()
        if kept is not None:
            clear = partial(_clear_after, self._real)
            self._weight.register_post_accumulate_grad_hook(clear)  # type: ignore[no-untyped-call, unused-ignore]
        columns = {name: grown(value, size, value.dtype) for name, value in values.items() if name != "weight"}
        core.binding.bind(self._weight, self._real, columns)

    def batch(self, name: str, number: int, index: Tensor, item: Any, put: Put) -> TableBatch:
        """The batch that the user gets."""
        core, at = self._core, self._core.served
        core.served += 1
        return TableBatch(
            number,
            index,
            item,
            rows=self._rows,
            inverse=self._inverse,
            weight=self._weight,
            real=self._real,
            name=name,
            dtype=core.dtype,
            binding=core.binding,
            rounded=lambda weight, rows: core.rounded(weight, rows, at),
            put=put,
        )


def _clear_after(real: int, weight: Tensor) -> None:
    """The padding id's row, which comes after the ``real`` ones, gets no gradient."""
    gradient = weight.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = weight.grad = gradient.to_dense()
    with torch.no_grad():
        gradient[real:].zero_()


def _padding_of(core: Core) -> int:
    assert core.padding is not None
    return core.padding
