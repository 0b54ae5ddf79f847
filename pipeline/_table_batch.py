"""What a RowTable hands out: a batch to train (one table or several), and a batch to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rowferry.stores._casts import cast

from ._table_optimizer import Binding

Put = Callable[[dict[str, dict[str, Tensor]]], None]
"""Writes columns back, by table; RuntimeError when a later batch was taken."""


def grown(values: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """``values`` as ``dtype`` with zero rows after them, ``rows`` in all. ``values`` itself where that is what it is."""
    if values.shape[0] == rows:
        return cast(values, dtype)
    out = values.new_zeros((rows, *values.shape[1:]), dtype=dtype)
    out[: values.shape[0]] = cast(values, dtype)
    return out


def picked(weight: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight[inverse]`` cast, differentiable; for matrices by ``embedding``, whose gradient adds up without atomics."""
    if weight.dim() == 2:
        rows = embedding(inverse, weight)
    else:
        rows = weight.index_select(0, inverse.reshape(-1)).view(*inverse.shape, *weight.shape[1:])
    return cast(rows, dtype)


@final
class TableBatch:
    """One table's rows of a batch, to be trained.

    Attributes:
        number: which batch of the epoch, from 0.
        index: the ids asked for, int64 on the device, in their own shape.
        item: what the sampler yielded, its tensors on the device.
        rows: the distinct ids, int64; ascending, but that the padding id, where the batch has it, comes last.
        inverse: for each id its place in ``rows``: ``rows[inverse] == index``.
        weight: a leaf that requires grad, ``(len(rows), *row_shape)``, rounded up with zero rows where ``pad_rows`` asks for
            it; float32 also for half-precision stores. The padding id's row is zero and gets no gradient.
    """

    def __init__(
        self,
        number: int,
        index: Tensor,
        item: Any,
        *,
        rows: Tensor,
        inverse: Tensor,
        weight: Tensor,
        real: int,
        name: str,
        dtype: torch.dtype,
        binding: Binding,
        rounded: Callable[[Tensor, Tensor], Tensor],
        put: Put,
    ) -> None:
        self.number, self.index, self.item = number, index, item
        self.rows, self.inverse, self.weight = rows, inverse, weight
        self._real, self._name, self._dtype = real, name, dtype
        self._binding, self._rounded, self._put = binding, rounded, put
        self._written = False

    def lookup(self) -> Tensor:
        """``weight[inverse]`` cast to the table's dtype: ``index.shape + row_shape``, differentiable in ``weight``."""
        return picked(self.weight, self.inverse, self._dtype)

    def step(self, scaler: Any = None) -> None:
        """The optimizer on these rows, then write-back of weight and state. Returns at once.

        Without any gradient, or in a batch without rows, the optimizer is not called and no counter moves.

        Args:
            scaler: a ``GradScaler`` to step through; its ``update()`` is yours to call. After a step that it skips the
                same bits are written, so the host need not know.

        Raises:
            RuntimeError: the optimizer was made elsewhere (call ``optimizer.step()``, then ``write_back()``); the next
                batch was already taken; this one was written back before.
        """
        self.require_open("stepped")
        if not self._binding.owned:
            raise RuntimeError(step_elsewhere(f"table {self._name!r}" if self._name else "the table"))
        step_optimizer([self._binding], scaler)
        self.write_back()

    def write_back(self) -> None:
        """Put the rows' weight and state back, as they are now, and unbind them from the optimizer. Returns at once.

        Raises:
            RuntimeError: the next batch was already taken; this one was written back before.
        """
        self.require_open("written back")
        self._put({self._name: self.values()})
        self.written()

    def require_open(self, what: str) -> None:
        """Raise RuntimeError when the batch can't be ``what`` any more."""
        if self._written:
            raise RuntimeError(f"batch {self.number} cannot be {what}: it was written back before; a batch is trained once")
        if not self._binding.is_bound(self.weight):
            raise RuntimeError(
                f"batch {self.number} cannot be {what} any more: a later batch was taken, or its epoch ended. Do it before "
                "the next next(); for gradient accumulation make one batch of all micro-batches' ids"
            )

    def values(self) -> dict[str, Tensor]:
        """Weight and state by column, as stores take them."""
        weight = self.weight.detach()[: self._real]
        return {"weight": self._rounded(weight, self.rows[: self._real]), **self._binding.columns()}

    def written(self) -> None:
        """The values are on their way."""
        self._binding.commit()
        self._written = True

    @property
    def binding(self) -> Binding:
        """The table's place in its optimizer."""
        return self._binding

    def __repr__(self) -> str:
        return f"<TableBatch {self.number}: {len(self.rows)} rows for {self.index.numel()} ids on {self.weight.device}>"


@final
class TablesBatch(Mapping[str, Any]):  # of TableBatch, with train=False of LookupBatch
    """One item's rows of several tables: ``batch["u"].weight``. Attributes ``number`` and ``item`` as of a TableBatch."""

    def __init__(self, number: int, item: Any, parts: dict[str, Any], put: Put) -> None:
        self.number, self.item = number, item
        self._parts, self._put = parts, put

    def __getitem__(self, table: str) -> Any:
        return self._parts[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def lookup(self) -> dict[str, Tensor]:
        """``lookup()`` of each table, by its name."""
        return {name: part.lookup() for name, part in self._parts.items()}

    def step(self, scaler: Any = None) -> None:
        """Step each distinct optimizer once, then write all tables back. See ``TableBatch.step``.

        Raises:
            RuntimeError: as ``TableBatch.step``; an optimizer that none of the tables made.
        """
        for part in self._parts.values():
            part.require_open("stepped")
        bindings = [part.binding for part in self._parts.values()]
        made = {id(binding.optimizer) for binding in bindings if binding.owned}
        for name, part in self._parts.items():
            if id(part.binding.optimizer) not in made:
                raise RuntimeError(step_elsewhere(f"table {name!r}"))
        step_optimizer(bindings, scaler)
        self.write_back()

    def write_back(self) -> None:
        """Put the rows of all tables back. See ``TableBatch.write_back``."""
        for part in self._parts.values():
            part.require_open("written back")
        self._put({name: part.values() for name, part in self._parts.items()})
        for part in self._parts.values():
            part.written()

    def __repr__(self) -> str:
        return f"<TablesBatch {self.number}: {', '.join(f'{name}: {part!r}' for name, part in self._parts.items())}>"


@final
class LookupBatch:
    """One table's rows of a batch, to be looked at (``train=False``). Attributes as of a TableBatch; no gradient."""

    def __init__(self, number: int, index: Tensor, item: Any, found: Tensor, dtype: torch.dtype, pad_rows: int) -> None:
        self.number, self.index, self.item = number, index, item
        self._found, self._dtype, self._pad_rows = found, dtype, pad_rows
        self._distinct: tuple[Tensor, Tensor] | None = None

    def lookup(self) -> Tensor:
        """The rows in the order asked for, cast to the table's dtype: ``index.shape + row_shape``."""
        return cast(self._found, self._dtype)

    @property
    def rows(self) -> Tensor:
        """The distinct ids, ascending. Found at the first use, for which the host waits for the device."""
        return self._unique()[0]

    @property
    def inverse(self) -> Tensor:
        """For each id its place in ``rows``."""
        return self._unique()[1]

    @property
    def weight(self) -> Tensor:
        """A row for each of ``rows``, with zero rows after them as ``pad_rows`` asks."""
        rows, inverse = self._unique()
        shape = self._found.shape[self.index.dim() :]
        weight = self._found.new_zeros((rounded_up(len(rows), self._pad_rows), *shape))
        weight[inverse.reshape(-1)] = self._found.reshape(-1, *shape)  # uses of one row are equal
        return weight

    def step(self, scaler: Any = None) -> None:
        """Not of a batch that was asked for with ``train=False``: RuntimeError."""
        del scaler
        self.require_open("stepped")

    def write_back(self) -> None:
        """Not of a batch that was asked for with ``train=False``: RuntimeError."""
        self.require_open("written back")

    def require_open(self, what: str) -> None:
        """Raise RuntimeError: the batch is to be looked at."""
        raise RuntimeError(f"batch {self.number} cannot be {what}: it was asked for with train=False")

    def _unique(self) -> tuple[Tensor, Tensor]:
        if self._distinct is None:
            rows, inverse = torch.unique(self.index, return_inverse=True)
            self._distinct = rows, inverse.view(self.index.shape)
        return self._distinct

    def __repr__(self) -> str:
        return f"<LookupBatch {self.number}: {self.index.numel()} ids on {self.index.device}>"


def rounded_up(rows: int, multiple: int) -> int:
    """``rows`` up to a multiple of ``multiple``."""
    return -(-rows // multiple) * multiple


def step_optimizer(bindings: list[Binding], scaler: Any) -> None:
    """Step each distinct optimizer once, those without any gradient not at all."""
    for binding in bindings:
        binding.prepare()
    for binding in {id(binding.optimizer): binding for binding in bindings}.values():
        if not binding.has_gradient():
            continue
        if scaler is None:
            binding.optimizer.step()
        else:
            scaler.step(binding.optimizer)


def step_elsewhere(who: str) -> str:
    """What batch.step() says when the optimizer is not the table's own."""
    return (
        f"{who} trains in an optimizer that was made elsewhere, which may hold other parameters too: call optimizer.step() "
        "yourself, then batch.write_back()"
    )
