"""What the user gets: a batch to read, or a batch to change and write back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from ._overflow import Overflow


class _Base:
    """What both kinds share. A batch's tensors belong to the user: it never changes under them."""

    __slots__ = ("_index", "_indices", "item", "number")

    def __init__(self, number: int, indices: Callable[[], Any], item: Any) -> None:
        self.number = number
        """Which batch of the epoch, from 0."""
        self._indices: Callable[[], Any] | None = indices
        self._index: Any = None
        self.item = item
        """What the batch sampler yielded, its tensors on the device; None with ``batch_size`` alone."""

    @property
    def index(self) -> Any:
        """The rows asked for, int64 on the device, in the index's own shape; a dict by table when there are several.

        Copied at the first look, on the stream that is then current (with ``local`` it is there at ``next()``, on the stream
        of that); from then on the same tensor. A kept batch that was not looked at holds the ids of its whole window.
        RuntimeError when that stream is captured into a graph.
        """
        indices = self._indices  # once: another thread may look, too
        if indices is not None:
            self._index, self._indices = indices(), None
        return self._index

    @index.setter
    def index(self, index: Any) -> None:
        self._index, self._indices = index, None


@final
class Batch(_Base):
    """Rows on the device, ready on the stream that was current at ``next()``. Unpacks and indexes like its ``data``.

    On a GPU, small batches of a window lie side by side in one allocation of at most 32 MiB, each in a part of its own. One
    that is kept holds all of it, and ``torch.save`` writes all of it: keep or save ``batch.data.clone()`` where that matters.
    On a CPU the same goes for rows of files, read in order: batches are parts of the memory (at most 64 MiB) that a window
    was read into, which nobody else uses from then on.
    """

    __slots__ = ("data",)

    def __init__(self, number: int, indices: Callable[[], Any], item: Any, data: Any) -> None:
        super().__init__(number, indices, item)
        self.data = data
        """Tensors of shape ``index.shape + row_shape`` in the structure of ``source``: one, a tuple or a dict."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __len__(self) -> int:
        return len(self.data)

    def __reduce__(self) -> Any:
        return _batch_of, (self.number, self.index, self.item, self.data)

    def __repr__(self) -> str:
        return f"<Batch {self.number}: {_describe(self.data)}>"


def _batch_of(number: int, index: Any, item: Any, data: Any) -> Batch:
    """A batch that was pickled or copied."""
    return Batch(number, lambda: index, item, data)


@final
class WritableBatch(_Base):
    """Distinct rows to change, and the way back to their store.

    Attributes:
        rows: the distinct rows, int64, ascending, on the device; a dict by table when there are several.
        inverse: for each asked row its place in ``rows``: ``rows[inverse] == index``; int64, ``index.shape``.
        values: ``(len(rows), *row_shape)`` a column, in the store's dtype and the structure of ``source``; fresh
            tensors that you may change in place.
    """

    __slots__ = ("_lookup", "_write", "inverse", "rows", "values")

    def __init__(
        self,
        number: int,
        indices: Callable[[], Any],
        item: Any,
        *,
        rows: Any,
        inverse: Any,
        values: Any,
        lookup: Callable[[WritableBatch], Any],
        write: Callable[[WritableBatch, Any], None],
    ) -> None:
        super().__init__(number, indices, item)
        self.rows = rows
        self.inverse = inverse
        self.values = values
        self._lookup = lookup
        self._write = write

    @property
    def data(self) -> Any:
        """A writable batch has none.

        Raises:
            AttributeError: always; says what to use.
        """
        raise AttributeError(
            "a writable batch has no 'data': use batch.values (distinct rows) or batch.lookup() (one row an id)"
        )

    def lookup(self) -> Any:
        """``values[inverse]`` cast to the pipeline's dtype: shape ``index.shape + row_shape``, differentiable."""
        return self._lookup(self)

    def write_back(self, values: Any = None) -> None:
        """Put rows back: ``self.values`` as they are now, or new ``values`` for some of the columns.

        Values are cast to the store's dtype here, to nearest even, and copied in stream order: they may be changed or
        dropped at once. Batches served later see them. Returns at once; ``flush()`` waits until they are in the store.

        Args:
            values: in the structure of ``source`` (a dict may name some columns; in a tuple None skips one); shapes
                ``(len(rows), *row_shape)``, on the pipeline's device, from any stream.

        Raises:
            RuntimeError: the next batch was already taken. ValueError, TypeError, KeyError: shape, device or column.
        """
        self._write(self, values)

    def __repr__(self) -> str:
        return f"<WritableBatch {self.number}: {_describe(self.values)}>"


def spread(values: Tensor, inverse: Tensor, dtype: torch.dtype, overflow: Overflow | None = None) -> Tensor:
    """``values[inverse]`` of any index shape, cast; differentiable in ``values``. ``overflow`` counts what became inf."""
    from rowferry.stores._casts import cast

    rows = values.index_select(0, inverse.reshape(-1)).view(*inverse.shape, *values.shape[1:])
    if rows.dtype == dtype:
        return rows
    result = cast(rows, dtype)
    if overflow is not None:
        overflow.add(rows.detach(), result.detach())
    return result


def _describe(data: Any) -> str:
    if isinstance(data, Tensor):
        return f"{tuple(data.shape)} {str(data.dtype).removeprefix('torch.')} on {data.device}"
    if isinstance(data, dict):
        return ", ".join(f"{key}: {_describe(value)}" for key, value in data.items())
    if isinstance(data, tuple):
        return ", ".join(map(_describe, data))
    return type(data).__name__
