"""The ids of a window on their way to the device: snapshots of the sampler's arrays, and one upload a table.

A built-in order is not uploaded where the device can evaluate it: its places are one range, so one kernel writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores._device_contract import Device

from ._chunk_order import Mixed
from ._flight import Asked, Snapshot
from ._sampling import Positions
from ._shuffle import Permutation
from ._source import Table
from ._staging import PinnedPool, typed

SNAPSHOT_IDS = 4 << 20  # most ids of a snapshot that is made for several batches
INDEX_LIMIT = 2**31  # tables below it are addressed by int32: half the bytes across the link

Permute = Callable[[Tensor, int, Permutation], None]
"""``permute(out, start, permutation)``: rows at places ``start`` to ``start + len(out)``, on the current stream."""


@final
class Snapshots:
    """Pinned copies of the sampler's ids, made when they are taken: the caller may change its array as soon as we have
    returned to it. They go to the device from where they are. The producer's thread only.

    Batches that are drawn one after the other lie so too, and are uploaded together. Each torch operator gives up the GIL
    for a moment, and a training loop that takes it then keeps it for longer than the ids need: so no batch calls one here.
    """

    def __init__(self, device: Device, pool: PinnedPool) -> None:
        self._device = device
        self._pool = pool
        self._open: dict[str, Snapshot] = {}  # with room for more, by table

    def room(self, table: Table, count: int, batches: int = 1) -> tuple[Snapshot, int]:
        """Where the next ``count`` ids of ``table`` go: a snapshot, and their first place in it.

        ``batches`` of so many are expected, this one among them.
        """
        snapshot = self._open.get(table.name)
        if snapshot is None or snapshot.filled + count > len(snapshot.host):
            dtype = id_dtype(table.rows)
            buffer = self._pool.take(max(count, min(count * batches, SNAPSHOT_IDS)) * dtype.itemsize)
            ids = buffer.view(dtype)
            self._device.host_writes(ids)
            snapshot = self._open[table.name] = Snapshot(buffer, ids, ids.numpy())
        start = snapshot.filled
        snapshot.filled += count
        snapshot.uses += 1
        return snapshot, start

    def seal(self) -> None:
        """What was taken may be uploaded: nothing is added to it any more."""
        self._open.clear()

    def give(self, snapshot: Snapshot) -> None:
        """One batch does not need it any more, and what was launched from it has passed. After ``seal``."""
        snapshot.uses -= 1
        if not snapshot.uses:
            self._pool.give(snapshot.buffer, None)


def id_dtype(rows: int) -> torch.dtype:
    """What ids of a table of ``rows`` rows cross the link as."""
    return torch.int32 if rows < INDEX_LIMIT else torch.int64


def bring_ids(
    device: Device, pool: PinnedPool, stream: Any, permute: Permute | None, asked: Sequence[Asked], out: Tensor
) -> None:
    """All batches' ids into ``out``, one after the other, on ``stream``, which is current."""
    positions = [batch.positions for batch in asked]
    if _on_device(device, permute, positions, out):
        return
    buffer = pool.take(sum(batch.count for batch in asked if batch.positions is not None) * out.element_size())
    start = filled = number = 0
    while number < len(asked):
        batch, together = asked[number], 1
        if batch.snapshot is not None:
            together, ids = _joined(asked, number)
            _bring(device, out[start : start + ids.numel()], ids)
        elif batch.positions is not None:
            rows = list(_evaluated(asked[number:]))
            together, count = len(rows), sum(each.size for each in rows)
            staged = typed(buffer[filled:], out.dtype, (count,))
            device.host_writes(staged)
            np.concatenate(rows, out=staged.numpy(), casting="same_kind")
            filled += staged.nbytes
            _bring(device, out[start : start + count], staged)
        elif batch.device is not None and batch.count:
            _copy(device, out[start : start + batch.count], batch.device)
        start += sum(one.count for one in asked[number : number + together])
        number += together
    pool.give(buffer, device.record(stream))


def _bring(device: Device, out: Tensor, pinned: Tensor) -> None:
    if out.numel():
        device.copy(out, pinned)


def _on_device(device: Device, permute: Permute | None, positions: Sequence[Positions | Mixed | None], out: Tensor) -> bool:
    """Evaluate a built-in order there; False where that is not possible."""
    first, last = positions[0], positions[-1]
    if not (isinstance(first, Positions) and isinstance(last, Positions) and all(isinstance(p, Positions) for p in positions)):
        return False
    if first.permutation is None:
        device.launch("order", lambda: torch.arange(first.start, last.stop, out=out), writes=[out])
        return True
    if permute is None:
        return False
    permutation = first.permutation
    device.launch("order", lambda: permute(out, first.start, permutation), writes=[out])
    return True


def _joined(asked: Sequence[Asked], first: int) -> tuple[int, Tensor]:
    """How many batches from ``first`` on have their ids one after the other in one snapshot, and those ids."""
    snapshot, start = asked[first].snapshot, asked[first].start
    assert snapshot is not None
    stop, number = start, first
    while number < len(asked) and asked[number].snapshot is snapshot and asked[number].start == stop:
        stop += asked[number].count
        number += 1
    return number - first, snapshot.ids[start:stop]


def _evaluated(asked: Sequence[Asked]) -> Iterator[NDArray[np.int64]]:
    """The rows of each batch, up to the first that has no positions."""
    for batch in asked:
        if batch.positions is None:
            return
        yield batch.positions.rows()


def _copy(device: Device, out: Tensor, rows: Tensor) -> None:
    device.launch("ids", lambda: out.copy_(rows), reads=[rows], writes=[out])
