"""What an epoch is made of: index batches, from a built-in order or from the user's sampler.

Guarantees:
- Bad arguments are refused in ``make_source``, before any sampler is touched.
- ``epoch`` itself calls ``set_epoch``, ``iter`` and what resuming needs, in the calling thread; ``next`` on what it
  returns draws one item and no more, so a sampler is never ahead of the last item by more than that item.

Assumes:
- One epoch of a source is drawn at a time, by one thread at a time. A user's sampler may keep its place in itself.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._shuffle import Permutation

logger = logging.getLogger("rowferry")


@final
@dataclass(frozen=True, slots=True)
class Positions:
    """The rows at places ``start`` to ``stop`` of an epoch's order, not yet evaluated; ``permutation`` None: row = place."""

    start: int
    stop: int
    permutation: Permutation | None

    def __len__(self) -> int:
        return self.stop - self.start

    def rows(self) -> NDArray[np.int64]:
        """The row numbers: int64, ``(len(self),)``, a new array at each call."""
        places = np.arange(self.start, self.stop, dtype=np.int64)
        return places if self.permutation is None else self.permutation(places)


class StatefulItem(NamedTuple):
    """One draw: the item, and the sampler's own state just after it (a copy; None where it keeps none)."""

    item: Any
    state: Any = None


class BatchSource(Protocol):
    """What yields index batches, an epoch at a time."""

    def __len__(self) -> int:
        """Batches in an epoch. TypeError when the sampler does not tell."""

    def epoch(self, number: int, skip: int = 0, state: Any = None) -> Iterator[StatefulItem]:
        """The batches of epoch ``number``, from batch ``skip`` on; ``state`` is what the item before it came with.

        Raises:
            RuntimeError: a one-shot iterator was drawn from before; the epoch ends before batch ``skip``.
        """


@final
@dataclass(frozen=True)
class BuiltIn:
    """Every row once an epoch, in order or shuffled; items are ``Positions``. Seeks to any batch at no cost."""

    n_rows: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def __len__(self) -> int:
        return _batches(self.n_rows, self.batch_size, self.drop_last)

    def epoch(self, number: int, skip: int = 0, state: Any = None) -> Iterator[StatefulItem]:
        del state  # skip tells it all
        permutation = Permutation(self.n_rows, self.seed, number) if self.shuffle else None
        starts = _starts(len(self), self.batch_size, skip)
        stops = ((start, min(start + self.batch_size, self.n_rows)) for start in starts)
        return (StatefulItem(Positions(start, stop, permutation)) for start, stop in stops)


@final
@dataclass(frozen=True, eq=False)
class RowArray:
    """Rows of one array in its order; items are int64 copies of its slices. Seeks to any batch at no cost."""

    rows: NDArray[Any]
    batch_size: int
    drop_last: bool

    def __len__(self) -> int:
        return _batches(len(self.rows), self.batch_size, self.drop_last)

    def epoch(self, number: int, skip: int = 0, state: Any = None) -> Iterator[StatefulItem]:
        """See ``BatchSource``; every epoch is the same, and ``state`` is not needed."""
        del number, state
        starts = _starts(len(self), self.batch_size, skip)
        return (StatefulItem(self.rows[start : start + self.batch_size].astype(np.int64)) for start in starts)


@final
class Foreign:
    """A user's sampler: items are what it yields, or (``batch_size`` given) int64 arrays of that many of its rows."""

    def __init__(self, origin: Iterable[Any], batch_size: int | None, drop_last: bool) -> None:
        self._origin = origin
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._drawn_from = False

    def __len__(self) -> int:
        try:
            length = len(self._origin)  # type: ignore[arg-type]  # not every sampler has one
        except (TypeError, NotImplementedError) as error:
            raise TypeError(f"{_kind(self._origin)} has no length, so neither has the pipeline that draws from it") from error
        return length if self._batch_size is None else _batches(length, self._batch_size, self._drop_last)

    def epoch(self, number: int, skip: int = 0, state: Any = None) -> Iterator[StatefulItem]:
        """See ``BatchSource``. Without ``state``, the ``skip`` batches before are drawn again and thrown away."""
        origin: Any = self._origin
        samplers: tuple[Any, ...] = (origin, getattr(origin, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        keeps_place = _is_stateful(origin)
        if state is not None and keeps_place:
            origin.load_state_dict(state)  # before iter, which starts from there
        drawn = iter(origin)
        if drawn is origin and self._drawn_from and not hasattr(origin, "set_epoch"):
            raise RuntimeError(
                f"{_kind(origin)} is an iterator that can be drawn from once, and an earlier epoch did; "
                "pass an object whose iter() starts anew each time: a list, a torch sampler, a class with __iter__"
            )
        self._drawn_from = True
        keeper: Any = origin if keeps_place else drawn if _is_stateful(drawn) else None
        if state is not None and not keeps_place:
            if keeper is None:
                raise RuntimeError(f"the saved state is that of a sampler with load_state_dict; {_kind(origin)} has none")
            keeper.load_state_dict(state)
        items: Iterator[Any] = drawn
        if self._batch_size is not None:
            items = _grouped(drawn, self._batch_size, self._drop_last, 0 if state is None else skip)
        if state is None and skip:
            self._redraw(items, skip)
        # Samplers may hand out the very object that they go on changing, hence the copy.
        return (StatefulItem(item, None if keeper is None else copy.deepcopy(keeper.state_dict())) for item in items)

    def _redraw(self, items: Iterator[Any], skip: int) -> None:
        said = "resuming at batch %d: %s came without a saved state, so its first batches are drawn again and skipped"
        logger.info(said, skip, _kind(self._origin))
        skipped = sum(1 for _ in itertools.islice(items, skip))
        if skipped < skip:
            raise RuntimeError(f"cannot resume at batch {skip}: {_kind(self._origin)} ended after {skipped} batches")


def make_source(
    n_rows: int,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    drop_last: bool = False,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    seed: int = 0,
) -> BatchSource:
    """The source that a pipeline's arguments ask for; they mean what they mean to ``torch.utils.data.DataLoader``.

    Args:
        n_rows: rows of the table that a built-in order runs over.
        batch_size: rows in a batch, also with ``sampler``; without it, ``sampler`` is taken as ``batch_sampler``.
        shuffle, drop_last, seed: the built-in order by a keyed permutation; whether a last, smaller batch is left out.
        sampler: yields row numbers (ints, 0-d tensors), or is a 1-d array of them.
        batch_sampler: yields index batches, or items that hold them.

    Raises:
        ValueError: arguments that exclude each other, none that gives batches, a batch size that is not a positive int.
        TypeError: a sampler that is not iterable, rows or a seed that are not integers.
    """
    seed = operator.index(seed)
    batch_size = None if batch_size is None else _positive(batch_size)
    if batch_sampler is not None:
        others = (("batch_size", batch_size), ("shuffle", shuffle), ("sampler", sampler), ("drop_last", drop_last))
        if given := [name for name, value in others if value is not None and value is not False]:
            raise ValueError(f"batch_sampler makes whole batches and excludes {', '.join(given)}; pass one or the other")
        return Foreign(_iterable(batch_sampler, "batch_sampler"), None, False)
    if sampler is not None:
        if shuffle:
            raise ValueError("sampler decides the order and excludes shuffle; pass one or the other")
        return _from_sampler(_iterable(sampler, "sampler"), batch_size, bool(drop_last))
    if batch_size is None:
        raise ValueError("nothing says what a batch is; pass batch_size=, sampler= or batch_sampler=")
    return BuiltIn(operator.index(n_rows), batch_size, bool(shuffle), bool(drop_last), seed)


def rows_of(item: Any, index: Any, number: int) -> Any:
    """The index that ``item``, batch ``number``, asks for: one, or a dict of them when ``index`` is a dict by table.

    ``index`` is None (the item is the index), a key (``item[key]``), a callable (``index(item)``), or a dict
    ``{table: key or callable}``. An item that is ``Positions`` counts as the rows at them.

    Raises:
        LookupError, TypeError: the item has no such key. What a callable raises is passed on, with a note.
    """
    if isinstance(item, Positions):
        item = item.rows()
    if index is None:
        return item
    if isinstance(index, Mapping):
        return {table: _one_index(item, get, f"index[{table!r}]", number) for table, get in index.items()}
    return _one_index(item, index, "index", number)


def _one_index(item: Any, get: Any, name: str, number: int) -> Any:
    if callable(get):
        try:
            return get(item)
        except Exception as error:
            error.add_note(f"raised by {name}= on the item of batch {number}, a {type(item).__name__}")
            raise
    said = f"{name}={get!r} does not lead to rows in the item of batch {number}, a {type(item).__name__}"
    try:
        return item[get]
    except LookupError as error:
        raise LookupError(f"{said}: it has no such entry; pass a key that every item has, or a callable") from error
    except TypeError as error:
        raise TypeError(f"{said}: {error}; pass a key of the item, or a callable that takes it") from error


def _from_sampler(sampler: Iterable[Any], batch_size: int | None, drop_last: bool) -> BatchSource:
    if batch_size is None:
        if drop_last:
            raise ValueError("drop_last needs batch_size: a sampler without it makes whole batches itself")
        return Foreign(sampler, None, False)
    if not isinstance(sampler, (np.ndarray, torch.Tensor)):
        return Foreign(sampler, batch_size, drop_last)
    rows = sampler.detach().cpu().numpy() if isinstance(sampler, torch.Tensor) else sampler
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise TypeError(
            f"sampler is an array of shape {rows.shape} and {rows.dtype}; with batch_size it must be 1-d, of integers"
        )
    return RowArray(rows, batch_size, drop_last)


def _grouped(rows: Iterator[Any], batch_size: int, drop_last: bool, first: int) -> Iterator[NDArray[np.int64]]:
    """Batches of ``rows``, the first of them being batch ``first``; takes no row that its batch does not need."""
    for number in itertools.count(first):
        group = list(itertools.islice(rows, batch_size))
        if not group or (drop_last and len(group) < batch_size):
            return
        try:
            batch = np.fromiter(map(operator.index, group), np.int64, len(group))
        except (TypeError, OverflowError) as error:
            said = f"batch {number}: sampler= must give row numbers, one at a time ({error})"
            raise TypeError(f"{said}; pass index batches as batch_sampler=") from error
        yield batch


def _positive(batch_size: Any) -> int:
    if isinstance(batch_size, (bool, np.bool_)) or not hasattr(batch_size, "__index__") or operator.index(batch_size) <= 0:
        raise ValueError(f"batch_size={batch_size!r} is not a positive int; pass the number of rows in a batch")
    return operator.index(batch_size)


def _iterable(sampler: Any, name: str) -> Iterable[Any]:
    if not hasattr(sampler, "__iter__") and not hasattr(sampler, "__getitem__"):
        raise TypeError(
            f"{name} is a {type(sampler).__name__}; it must be iterable: a list, a torch sampler, a class with __iter__"
        )
    return sampler  # type: ignore[no-any-return]


def _batches(rows: int, batch_size: int, drop_last: bool) -> int:
    return rows // batch_size if drop_last else -(-rows // batch_size)


def _starts(batches: int, batch_size: int, skip: int) -> range:
    if skip > batches:
        raise RuntimeError(f"cannot resume at batch {skip}: an epoch has {batches} batches")
    return range(skip * batch_size, batches * batch_size, batch_size)


def _is_stateful(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _kind(sampler: Any) -> str:
    return f"the sampler ({type(sampler).__name__})"
