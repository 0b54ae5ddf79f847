"""``prefetch``: the rows of an existing loop's next batches, fetched while it computes, and written back beside it.

Guarantees:
- The loop computes what it computed without: each batch sees every row that was written before, bit for bit.
- The items come as they are and in their order.

How: the switchers' stores become the columns of one writable pipeline. In each turn of the loop ``beforeForwardPass``
deals the batch's distinct rows out to the slots, and ``afterOptimizerStep`` gives the pipeline each row's last slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

import rowferry.pipeline as pipeline
from rowferry.stores import Store
from rowferry.stores._bytes import as_ints
from rowferry.stores._casts import cast

from ._common import Holder
from ._index import Flat, flatten, same
from ._models import Model
from ._optimizers import State

Switcher = Model | State


def prefetch(
    switchers: Any,
    index_batches: Iterable[Any],
    *,
    index: Callable[[Any], Any] | None = None,
    lookahead: int | Literal["auto"] = "auto",
    depth: int = 2,
    staging_bytes: int | None = None,
    threads: int | None = None,
) -> Prefetch:
    """``index_batches`` again, and while a loop runs over it the switchers' rows come and go beside it.

        for pos, neg in batches:                                                        # before
        for pos, neg in SpeedTorch.prefetch([(v, vAdagrad)], batches):                  # after: the loop stays as it is

    Inside the loop call ``beforeForwardPass`` and ``afterOptimizerStep`` with the item's indexes, as before. With others
    the former reads on demand (which waits for what was written), the latter is a RuntimeError. Rows are in the stores when
    the loop ends, by ``break`` or an exception too; what sees or saves a table inside the loop waits for them.

    Args:
        switchers: a switcher, or a list. What shares indexes (an embedding's model and optimizer switcher) is a tuple in it.
        index_batches: items, each with the indexes of one turn: for one entry of ``switchers`` the index, or the pair
            ``(positive, negative)``; for several entries a sequence of as many of these. It is drawn ahead, in another
            thread after the first item: give it a random generator of its own.
        index: takes the indexes, in that form, from an item that has more in it.
        lookahead, depth, staging_bytes, threads: the Pipeline's. ``lookahead=0`` draws each item when it is asked for.

    Switchers whose rows are on the GPU have nothing to fetch and work as always.

    Raises:
        TypeError: something that is not a model or optimizer switcher. RuntimeError: one that holds nothing yet. While the
        loop runs, ValueError: an item has no index for each entry. IndexError: a row out of range.
    """
    moving = {"lookahead": lookahead, "depth": depth, "staging_bytes": staging_bytes, "threads": threads}
    return Prefetch(_groups(switchers), index_batches, index, moving)


@final
class Prefetch:
    """What ``prefetch`` gives: an epoch each time it is iterated. One thread uses it."""

    def __init__(
        self,
        groups: list[tuple[Switcher, ...]],
        items: Iterable[Any],
        index: Callable[[Any], Any] | None,
        moving: dict[str, Any],
    ) -> None:
        self._groups, self._items, self._index, self._moving = groups, items, index, moving

    def __len__(self) -> int:
        """Items in an epoch. TypeError when the items do not tell."""
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """One epoch. Its end, ``break`` and an error land all rows before they go on."""
        tables = {
            str(number): table for number, group in enumerate(self._groups) if (table := _Table(str(number), group)).stores
        }
        if not tables:
            yield from self._items
            return
        devices = {holder._target() for table in tables.values() for holder, _column in table.columns.values()}
        if len(devices) > 1:
            raise ValueError(
                f"the switchers' parameters are on {sorted(map(str, devices))}; prefetch is for one device at a time"
            )
        with pipeline.Pipeline(
            {name: table.stores for name, table in tables.items()},
            batch_sampler=_Planned(self._items, self._index, len(self._groups)),
            index={name: _Indexes(int(name)) for name in tables},
            device=devices.pop(),
            writable=True,
            **self._moving,
        ) as pipe:
            for table in tables.values():
                table.attach(pipe)
            try:
                for batch in pipe:
                    for table in tables.values():
                        table.begin(batch)
                    yield batch.item.item
            finally:
                for table in tables.values():
                    table.detach()


@final
class _Item:
    """One turn's item, and the flat row numbers of each entry, as they were when it was drawn."""

    def __init__(self, item: Any, rows: list[Flat]) -> None:
        self.item, self.rows = item, rows


@final
class _Indexes:
    """Takes one entry's row numbers from an item."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, item: _Item) -> Flat:
        return item.rows[self._number]


@final
class _Planned:
    """The items with their row numbers."""

    def __init__(self, items: Iterable[Any], index: Callable[[Any], Any] | None, entries: int) -> None:
        self._items, self._index, self._entries = items, index, entries

    def __iter__(self) -> Iterator[_Item]:
        for item in self._items:
            given = item if self._index is None else self._index(item)
            if self._entries == 1:
                given = (given,)
            if not isinstance(given, Sequence) or len(given) != self._entries:
                raise ValueError(
                    f"an item gives {len(given) if isinstance(given, Sequence) else type(given).__name__} indexes for "
                    f"{self._entries} entries of switchers; it must be a sequence of as many, or pass index= to take them"
                )
            yield _Item(item, [_copied(each) for each in given])


@final
class _Table:
    """The stores of switchers that share indexes, and the batch that they are in. What a switcher asks as its ``Ahead``."""

    def __init__(self, name: str, group: tuple[Switcher, ...]) -> None:
        self._name = name
        self._pipe: pipeline.Pipeline | None = None
        self.columns: dict[str, tuple[Switcher, str]] = {}
        """Columns of the pipeline, and whose they are."""
        self.stores: dict[str, Store] = {}
        for place, holder in enumerate(group):
            for column, store in holder._held().items():
                if store.device.type == "cpu":
                    label = f"{place}.{column}"
                    self.columns[label], self.stores[label] = (holder, column), store
        self._labels = {(id(holder), column): label for label, (holder, column) in self.columns.items()}
        self._batch: Any = None
        self._values: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def attach(self, pipe: pipeline.Pipeline) -> None:
        """The switchers ask here from now on."""
        self._pipe = pipe
        for holder, _column in self.columns.values():
            holder._ahead = self

    def detach(self) -> None:
        """The switchers use their stores again; those have all rows when the pipeline is closed."""
        for holder, _column in self.columns.values():
            holder._ahead = None
        self._batch, self._values, self._last, self._pipe = None, {}, None, None

    def begin(self, batch: Any) -> None:
        """The next turn."""
        self._batch, self._last = batch, None
        self._values = dict(batch.values[self._name])

    def read(self, holder: Holder, column: str, rows: Flat) -> Tensor | None:
        """See ``Ahead``."""
        if self._batch is None or not same(rows, self._planned()):
            self.flush()
            return None
        values = self._values[self._labels[id(holder), column]]
        return _taken(values, self._batch.inverse[self._name].reshape(-1))

    def write(self, holder: Holder, column: str, rows: Flat, values: Tensor) -> None:
        """See ``Ahead``."""
        if self._batch is None or not same(rows, self._planned()):
            raise RuntimeError(
                "afterOptimizerStep was called with other indexes than this turn's item of prefetch gives: rows that were "
                "fetched ahead would not see them. Pass the item's indexes, or index= to prefetch"
            )
        if len(values) != len(rows):
            raise ValueError(f"the parameter has {len(values)} rows; the indexes name {len(rows)} slots")
        label = self._labels[id(holder), column]
        changed = cast(_taken(values.detach(), self._last_slots()), self._values[label].dtype)
        self._values[label] = changed
        self._batch.write_back({self._name: {label: changed}})

    def flush(self) -> None:
        """See ``Ahead``."""
        if self._pipe is not None:
            self._pipe.flush()

    def _planned(self) -> Flat:
        rows: Flat = self._batch.item.rows[int(self._name)]
        return rows

    def _last_slots(self) -> Tensor:
        """For each distinct row its last slot."""
        if self._last is None:
            inverse = self._batch.inverse[self._name].reshape(-1)
            here = torch.arange(inverse.numel(), device=inverse.device)
            empty = here.new_zeros(len(self._batch.rows[self._name]))
            self._last = empty.scatter_reduce(0, inverse, here, "amax")
        return self._last


def _groups(switchers: Any) -> list[tuple[Switcher, ...]]:
    entries = switchers if isinstance(switchers, list) else [switchers]
    groups = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
    wrong = [each for group in groups for each in group if not isinstance(each, Model | State)]
    if wrong or not groups:
        what = f"a {type(wrong[0]).__name__}" if wrong else "none"
        raise TypeError(f"prefetch takes model and optimizer switchers, and tuples of them in a list; it was given {what}")
    everyone = [id(each) for group in groups for each in group]
    if len(set(everyone)) != len(everyone):
        raise ValueError("a switcher is named twice; each has one index")
    return groups


def _copied(index: Any) -> Flat:
    """Flat row numbers of an index or a pair, of their own memory: the script may change its arrays."""
    flat = flatten(*index) if isinstance(index, tuple) else flatten(index)
    return flat.clone() if isinstance(flat, Tensor) else np.array(flat)


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """``values[places]`` of any dtype, on the current stream."""
    return as_ints(values.contiguous()).index_select(0, places).view(values.dtype)
