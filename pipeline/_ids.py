"""The ids of a window on their way to the device: snapshots of the sampler's arrays, and one upload a table.

A built-in order is not uploaded where the device can evaluate it: its places are one range, so one kernel writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores._device_contract import Device

from ._flight import Asked, Snapshot
from ._sampling import Positions
from ._shuffle import Permutation
from ._staging import PinnedPool, typed

INDEX_LIMIT = 2**31  # tables below it are addressed by int32: half the bytes across the link

Permute = Callable[[Tensor, int, Permutation], None]
"""``permute(out, start, permutation)``: rows at places ``start`` to ``start + len(out)``, on the current stream."""


@final
class Snapshots:
    """Pinned copies of the sampler's ids, made when they are taken: the caller may change its array as soon as we have
    returned to it. They go to the device from where they are. The producer's thread only."""

    def __init__(self, device: Device, pool: PinnedPool) -> None:
        self._device = device
        self._pool = pool

    def empty(self, count: int, dtype: torch.dtype, uses: int = 1) -> Snapshot:
        """Room for ``count`` ids, free again after ``uses`` calls of ``give``."""
        buffer = self._pool.take(count * dtype.itemsize)
        ids = typed(buffer, dtype, (count,))
        self._device.host_writes(ids)
        return Snapshot(buffer, ids, uses)

    def give(self, snapshot: Snapshot) -> None:
        """One user does not need it any more, and what it launched from it has passed."""
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
    if all(place is not None for place in positions) and _on_device(device, permute, positions, out):
        return
    joined = _joined(asked)
    if joined is not None:
        device.copy(out, joined)
        return
    hosts = [batch.host if batch.host is not None else _evaluated(batch) for batch in asked]
    total = sum(host.size for host in hosts if host is not None)
    buffer = pool.take(total * out.element_size())
    staged = typed(buffer, out.dtype, (total,))
    device.host_writes(staged)
    numbers = staged.numpy()
    start = filled = 0
    whole = total == out.numel()
    for batch, host in zip(asked, hosts, strict=True):
        target = out[start : start + batch.count]
        start += batch.count
        if host is not None:
            numbers[filled : filled + host.size] = host
            if not whole and host.size:
                device.copy(target, staged[filled : filled + host.size])
            filled += host.size
        elif batch.device is not None and batch.count:
            _copy(device, target, batch.device)
    if whole and total:
        device.copy(out, staged)
    pool.give(buffer, device.record(stream))


def _on_device(device: Device, permute: Permute | None, positions: Sequence[Positions | None], out: Tensor) -> bool:
    """Evaluate a built-in order there; False where that is not possible."""
    first, last = positions[0], positions[-1]
    assert first is not None
    assert last is not None
    if first.permutation is None:
        device.launch("order", lambda: torch.arange(first.start, last.stop, out=out), writes=[out])
        return True
    if permute is None:
        return False
    permutation = first.permutation
    device.launch("order", lambda: permute(out, first.start, permutation), writes=[out])
    return True


def _joined(asked: Sequence[Asked]) -> Tensor | None:
    """The batches' ids where they lie one after the other in one snapshot: one copy takes them all."""
    snapshot, start = asked[0].snapshot, asked[0].start
    at = start
    for batch in asked:
        if snapshot is None or batch.snapshot is not snapshot or batch.start != at:
            return None
        at += batch.count
    return snapshot.ids[start:at] if snapshot is not None else None


def _evaluated(asked: Asked) -> NDArray[np.int64] | None:
    return asked.positions.rows() if asked.positions is not None else None


def _copy(device: Device, out: Tensor, rows: Tensor) -> None:
    device.launch("ids", lambda: out.copy_(rows), reads=[rows], writes=[out])
