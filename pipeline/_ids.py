"""The ids of a window on their way to the device: snapshots of the sampler's arrays, and one upload a table.

A built-in order is not uploaded where the device can evaluate it: its places are one range, so one kernel writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowferry.stores._device_contract import Device

from ._flight import Asked
from ._sampling import Positions
from ._shuffle import Permutation
from ._staging import PinnedPool, typed

Permute = Callable[[Tensor, int, Permutation], None]
"""``permute(out, start, permutation)``: rows at places ``start`` to ``start + len(out)``, on the current stream."""


@final
class Snapshots:
    """Arrays that ids are copied into when they are taken, and that are used again: fresh memory costs a page fault
    every 4 KiB, which is more than the copy. The producer's thread only."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, Any], list[NDArray[Any]]] = defaultdict(list)

    def of(self, rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        """``rows``, which fit ``dtype``, copied."""
        size = 1 << max(rows.size - 1, 0).bit_length()
        free = self._free[size, dtype]
        memory = free.pop() if free else np.empty(size, dtype)
        snapshot = memory[: rows.size]
        np.copyto(snapshot, rows, casting="same_kind")
        return snapshot

    def give(self, snapshot: NDArray[Any]) -> None:
        """It is not needed any more."""
        memory = snapshot.base
        if isinstance(memory, np.ndarray):
            self._free[memory.size, memory.dtype].append(memory)


def bring_ids(
    device: Device, pool: PinnedPool, stream: Any, permute: Permute | None, asked: Sequence[Asked], out: Tensor
) -> None:
    """All batches' ids into ``out``, one after the other, on ``stream``, which is current."""
    positions = [batch.positions for batch in asked]
    if all(place is not None for place in positions) and _on_device(device, permute, positions, out):
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
    device.launch("order", lambda: permute(out, first.start, first.permutation), writes=[out])
    return True


def _evaluated(asked: Asked) -> NDArray[np.int64] | None:
    return asked.positions.rows() if asked.positions is not None else None


def _copy(device: Device, out: Tensor, rows: Tensor) -> None:
    device.launch("ids", lambda: out.copy_(rows), reads=[rows], writes=[out])
