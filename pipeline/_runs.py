"""Runs: rows that follow each other in the table, so that they cross as one plain copy by the copy engine.

The host knows runs without looking at rows: from the bounds of ranges, and of arrays whose ends say that they are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from rowferry.stores._device_contract import Device

from ._flight import Asked
from ._sampling import Positions

Runs = tuple[tuple[int, int], ...]
"""First row and end of each run, ascending and apart."""

RUN_BYTES = 4 << 20  # a copy of that size reaches 0.9 of the link; shorter runs are left to a kernel


def runs_of(asked: Iterable[Asked], distinct: int) -> Runs | None:
    """The ``distinct`` rows that batches ask for, as runs; None when they are not, or the host does not know.

    Costs a few numbers a batch, and one pass over an array that is a range.
    """
    spans = []
    for batch in asked:
        if batch.count:
            span = _span(batch)
            if span is None:
                return None
            spans.append(span)
    runs: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    # Spans hold every row asked for; as many distinct rows as places in them are all of them.
    return tuple(runs) if sum(stop - start for start, stop in runs) == distinct else None


def _span(asked: Asked) -> tuple[int, int] | None:
    """Bounds of a batch that looks like a range; all its rows lie in them."""
    places = asked.positions
    if isinstance(places, Positions) and places.permutation is None:
        return places.start, places.stop
    if asked.host is None:
        return None
    first, last = int(asked.host[0]), int(asked.host[-1])
    if last - first != asked.count - 1 or int(asked.host.min()) != first or int(asked.host.max()) != last:
        return None
    return first, last + 1


def are_few(runs: Runs | None, rows: Tensor) -> bool:
    """Whether ``rows`` had better cross by a copy a run."""
    return runs is not None and len(runs) <= max(rows.nbytes // RUN_BYTES, 1)


def copy_in(device: Device, memory: Tensor, runs: Sequence[tuple[int, int]], out: Tensor) -> None:
    """``out``, ``(k, *row_shape)``, gets the rows of ``runs`` of ``memory``, pinned, on the current stream."""
    at = 0
    for start, stop in runs:
        device.copy(out[at : at + stop - start], memory[start:stop])
        at += stop - start


def copy_out(device: Device, rows: Tensor, runs: Sequence[tuple[int, int]], memory: Tensor) -> None:
    """The rows of ``runs`` of ``memory``, pinned, get ``rows``, ``(k, *row_shape)``, on the current stream."""
    at = 0
    for start, stop in runs:
        device.copy(memory[start:stop], rows[at : at + stop - start])
        at += stop - start
