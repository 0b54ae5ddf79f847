"""The arithmetic of a window on the CPU, by NumPy in the calling thread alone.

torch shares an operator on tens of thousands of ids among a pool of threads and waits for the last of them. Beside a
training loop and threads that read, which have the cores, that takes far longer than the rows' copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ._window import Layout, Older, Sorted


@final
class HostPlan:
    """``Plan`` for tensors of the CPU; what ``TorchPlan`` gives, bit for bit. Any thread."""

    def count(self, ids: Tensor, ends: Tensor, older: Sequence[Older], out: Sorted, counts: Tensor) -> None:
        """See ``Plan``."""
        ordered, order, stops, lines = out.ids.numpy(), out.order.numpy(), ends.numpy(), counts.numpy()
        _sort(ids.numpy(), ordered, order)
        batch = _batches(order, stops)
        first, pair = _firsts(ordered, batch)
        source, _ = _sources(ordered, older)
        for line in range(len(older) + 1):
            mine = first if source is None and not line else first & (_as_array(source, first) == line)
            lines[line] = np.cumsum(np.bincount(batch[mine], minlength=stops.size))
        lines[-1] = np.cumsum(np.bincount(batch[pair], minlength=stops.size))

    def arrange(self, sorted_: Sorted, ends: Tensor, older: Sequence[Older], sizes: Sequence[int], out: Layout) -> None:
        """See ``Plan``."""
        ids, order = sorted_.ids.numpy(), sorted_.order.numpy()
        batch = _batches(order, ends.numpy())
        first, pair = _firsts(ids, batch)
        source, older_places = _sources(ids, older)
        if source is None or older_places is None:
            place = np.cumsum(first) - 1
        else:
            place, base = np.zeros(ids.size, np.int64), 0
            for line, size in enumerate(sizes):
                mine = source == line
                np.copyto(place, np.cumsum(first & mine) + (base - 1), where=mine)
                if line:
                    chosen = first & mine
                    out.carried[line - 1].numpy()[place[chosen] - base] = older_places[chosen]
                base += size
        out.places.numpy()[order] = place
        distinct, where = ids[first], place[first]
        out.rows.numpy()[where] = distinct
        out.older.rows.numpy()[:] = distinct
        out.older.places.numpy()[:] = where
        if out.batch_places is not None and out.inverse is not None:
            _spread_pairs(pair, order, place, batch, out.batch_places.numpy(), out.inverse.numpy())


def _sort(ids: NDArray[Any], ordered: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Ids ascending and where each came from; equal ids keep their order."""
    if bool(np.all(ids[1:] >= ids[:-1])):
        ordered[:] = ids
        order[:] = np.arange(ids.size)
        return
    bits = max(ids.size - 1, 1).bit_length()
    if int(ids.max()).bit_length() + bits < 64:  # id and place as one number, all distinct: twice as fast
        together = np.sort((ids.astype(np.int64) << bits) | np.arange(ids.size))
        np.bitwise_and(together, (1 << bits) - 1, out=order)
        ordered[:] = together >> bits
    else:
        order[:] = np.argsort(ids, kind="stable")
        np.take(ids, order, out=ordered, mode="clip")


def _batches(order: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[Any]:
    """Which batch each sorted id was asked by."""
    kind = np.uint16 if ends.size < 1 << 16 else np.int64  # NumPy sorts the short ones in one pass
    return np.repeat(np.arange(ends.size, dtype=kind), np.diff(ends, prepend=0))[order]


def _firsts(ids: NDArray[Any], batch: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Where a distinct row begins among sorted ids, and where a distinct row of a batch does."""
    first = np.ones(ids.size, np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    pair = first.copy()
    pair[1:] |= batch[1:] != batch[:-1]
    return first, pair


def _sources(ids: NDArray[Any], older: Sequence[Older]) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """For each id 0 for the store or 1 + the number of the newest older window that holds it; and its place there. None
    where no older window has rows between the first and the last id."""
    source = places = None
    for line in range(len(older) - 1, -1, -1):  # the newest is written last, so it wins
        rows, there = older[line].rows.numpy(), older[line].places.numpy()
        if not rows.size or not ids.size or rows[-1] < ids[0] or rows[0] > ids[-1]:
            continue
        at = np.minimum(np.searchsorted(rows, ids), rows.size - 1)
        held = rows[at] == ids
        if source is None or places is None:
            source, places = np.zeros(ids.size, np.int64), np.zeros(ids.size, np.int64)
        np.copyto(source, line + 1, where=held)
        np.copyto(places, there[at], where=held)
    return source, places


def _as_array(source: NDArray[np.int64] | None, like: NDArray[Any]) -> NDArray[np.int64]:
    return np.zeros(like.size, np.int64) if source is None else source


def _spread_pairs(
    pair: NDArray[np.bool_],
    order: NDArray[np.int64],
    place: NDArray[np.int64],
    batch: NDArray[Any],
    batch_places: NDArray[np.int64],
    inverse: NDArray[np.int64],
) -> None:
    """See ``_window.spread_pairs``; ``batch`` of each sorted id."""
    pair_batch = batch[pair]
    by_batch = np.argsort(pair_batch, kind="stable")
    np.take(place[pair], by_batch, out=batch_places, mode="clip")
    sizes = np.bincount(pair_batch)
    starts = np.cumsum(sizes) - sizes
    rank = np.empty(by_batch.size, np.int64)
    rank[by_batch] = np.arange(by_batch.size)
    inverse[order] = (rank - starts[pair_batch])[np.cumsum(pair) - 1]
