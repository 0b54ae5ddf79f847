"""The arithmetic of a window: distinct rows, each batch's places among them, and each row's source. Pure.

One table of one window. ``n`` ids asked for by ``b`` batches, one after the other; ``d`` distinct rows among them.
Two steps, since sizes must be known before memory is taken: ``count`` says how many rows there are after each batch
and where they come from (the caller reads that back and decides how many batches fit); ``arrange`` lays them out.

The slot holds the distinct rows grouped by source: first those from the store, ascending, then those carried from
the window before, ascending, then from the one before that. So what comes from one place is one block of the slot.

Everything here is torch operators on tensors of one device, without a host sync: it runs on a stream. It is also the
oracle of ``_plan_kernels``, which does the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Older:
    """A window in flight that rows may be carried from.

    Attributes:
        rows: its distinct rows, ascending, ``(d,)``.
        places: where each of ``rows`` lies in its slot, int64 ``(d,)``.
    """

    rows: Tensor
    places: Tensor


@dataclass(frozen=True)
class Sorted:
    """What ``count`` leaves for ``arrange``. All ``(n,)``.

    Attributes:
        ids: the ids, ascending.
        order: which asked position each came from, int64; equal ids keep their order.
    """

    ids: Tensor
    order: Tensor


@dataclass(frozen=True)
class Layout:
    """What ``arrange`` writes. Tensors are the caller's, uninitialised.

    Attributes:
        rows: row of each place of the slot, ids' dtype ``(d,)``.
        places: place of each asked id, int64 ``(n,)``.
        older: this window as an ``Older`` for the next ones.
        carried: per older window, the place in that window's slot of each carried row, int64.
        batch_places: places of each batch's distinct rows, rows ascending, one batch after the other, int64
            ``(pairs,)``; None in a read-only pipeline.
        inverse: for each asked id, which of its batch's distinct rows it is, int64 ``(n,)``; None when read-only.
    """

    rows: Tensor
    places: Tensor
    older: Older
    carried: tuple[Tensor, ...]
    batch_places: Tensor | None
    inverse: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All of them."""
        found = [self.rows, self.places, self.older.rows, self.older.places, *self.carried]
        return found + [tensor for tensor in (self.batch_places, self.inverse) if tensor is not None]


class Plan(Protocol):
    """The two steps, on the current stream."""

    def count(self, ids: Tensor, ends: Tensor, older: Sequence[Older], out: Sorted, counts: Tensor) -> None:
        """Sort ``ids`` and count, after each batch, what the window holds so far.

        Args:
            ids: row numbers ``(n,)``, int32 or int64, in range, n > 0.
            ends: where each batch ends among them, int64 ``(b,)``.
            older: windows that rows may be carried from, newest first.
            out: gets the sorted ids.
            counts: int64 ``(2 + len(older), b)``, gets, after each batch: rows from the store; rows carried from each of
                ``older``; pairs of (batch, distinct row).
        """

    def arrange(self, sorted_: Sorted, ends: Tensor, older: Sequence[Older], sizes: Sequence[int], out: Layout) -> None:
        """Lay out a window: see ``Layout``.

        Args:
            sorted_: from ``count`` over the same ids.
            sizes: the last column of ``count``'s counts but for the pairs: rows from the store, then from each of ``older``.
        """


@final
class TorchPlan:
    """The plan by torch operators, on any device."""

    def count(self, ids: Tensor, ends: Tensor, older: Sequence[Older], out: Sorted, counts: Tensor) -> None:
        """See ``Plan``."""
        torch.sort(ids, stable=True, out=(out.ids, out.order))
        first, pair = _firsts(out, ends)
        source, _ = _sources(out.ids, older)
        for line in range(len(older) + 1):
            _cumulative(first & (source == line), out.order, ends, counts[line])
        _cumulative(pair, out.order, ends, counts[-1])

    def arrange(self, sorted_: Sorted, ends: Tensor, older: Sequence[Older], sizes: Sequence[int], out: Layout) -> None:
        """See ``Plan``."""
        ids, order = sorted_.ids, sorted_.order
        first, pair = _firsts(sorted_, ends)
        source, older_places = _sources(ids, older)
        place = torch.zeros_like(order)
        base = 0
        for line, size in enumerate(sizes):
            mine = source == line
            place = torch.where(mine, torch.cumsum(first & mine, 0) + (base - 1), place)
            if line:
                _scatter_where(mine, place - base, older_places, out.carried[line - 1])
            base += size
        out.places.scatter_(0, order, place)
        out.rows.scatter_(0, place, ids)
        rank = torch.cumsum(first, 0) - 1
        out.older.rows.scatter_(0, rank, ids)
        out.older.places.scatter_(0, rank, place)
        if out.batch_places is not None and out.inverse is not None:
            spread_pairs(pair, order, place, ends, out.batch_places, out.inverse)


def _firsts(sorted_: Sorted, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Where a distinct row begins among sorted ids, and where a distinct row of a batch does."""
    first = torch.ones_like(sorted_.ids, dtype=torch.bool)
    torch.ne(sorted_.ids[1:], sorted_.ids[:-1], out=first[1:])
    batch = torch.bucketize(sorted_.order, ends, right=True)
    pair = first.clone()
    pair[1:] |= batch[1:] != batch[:-1]
    return first, pair


def _sources(ids: Tensor, older: Sequence[Older]) -> tuple[Tensor, Tensor]:
    """For each id 0 for the store or 1 + the number of the newest older window that holds it; and its place there."""
    source = torch.zeros_like(ids, dtype=torch.int64)
    places = torch.zeros_like(source)
    for line in range(len(older) - 1, -1, -1):  # the newest is written last, so it wins
        window = older[line]
        if not window.rows.numel():
            continue
        at = torch.searchsorted(window.rows, ids).clamp_(max=window.rows.numel() - 1)
        held = window.rows[at] == ids
        source = torch.where(held, line + 1, source)
        places = torch.where(held, window.places[at], places)
    return source, places


def _cumulative(flags: Tensor, order: Tensor, ends: Tensor, out: Tensor) -> None:
    """How many of ``flags`` (in sorted order) lie in the asked positions before each of ``ends``."""
    asked = torch.zeros_like(order)
    asked.scatter_(0, order, flags.to(torch.int64))
    total = torch.cumsum(asked, 0)
    out.copy_(torch.where(ends > 0, total[(ends - 1).clamp(min=0)], 0))


def _scatter_where(mask: Tensor, at: Tensor, values: Tensor, out: Tensor) -> None:
    """``out[at[mask]] = values[mask]`` without a data-dependent size: the others go to one spare place."""
    spare = torch.empty(out.numel() + 1, dtype=out.dtype, device=out.device)
    spare.scatter_(0, torch.where(mask, at, out.numel()), values)
    out.copy_(spare[:-1])


def spread_pairs(pair: Tensor, order: Tensor, place: Tensor, ends: Tensor, batch_places: Tensor, inverse: Tensor) -> None:
    """Each batch's own distinct rows, and each asked id's place among them: see ``Layout``.

    The (row, batch) pairs, which are in row order, are sorted stably by batch.

    Args:
        pair: bool ``(n,)``, where a distinct row of a batch begins among the sorted ids.
        order, place: of each sorted id its asked position, and its row's place in the slot.
    """
    total = batch_places.numel()
    number = torch.cumsum(pair, 0) - 1  # which pair each sorted id belongs to
    batch = torch.bucketize(order, ends, right=True)
    pair_batch = torch.empty(total, dtype=torch.int64, device=place.device).scatter_(0, number, batch)
    pair_place = torch.empty_like(pair_batch).scatter_(0, number, place)
    sorted_batch, by_batch = torch.sort(pair_batch, stable=True)
    torch.index_select(pair_place, 0, by_batch, out=batch_places)
    start = torch.searchsorted(sorted_batch, pair_batch)  # where the pair's batch begins
    rank = torch.empty_like(by_batch).scatter_(0, by_batch, torch.arange(total, device=place.device))
    inverse.scatter_(0, order, (rank - start)[number])
