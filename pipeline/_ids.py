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
        self._uses: dict[int, int] = {}  # by the memory's id: batches that still hold a part of it

    def empty(self, count: int, dtype: np.dtype[Any], uses: int = 1) -> NDArray[Any]:
        """``count`` uninitialised numbers; free again after ``uses`` calls of ``give`` with parts of it."""
        size = 1 << max(count - 1, 0).bit_length()
        free = self._free[size, dtype]
        memory = free.pop() if free else np.empty(size, dtype)
        self._uses[id(memory)] = uses
        return memory[:count]

    def of(self, rows: NDArray[Any], dtype: np.dtype[Any], uses: int = 1) -> NDArray[Any]:
        """``rows``, which fit ``dtype``, copied."""
        snapshot = self.empty(rows.size, dtype, uses)
        np.copyto(snapshot, rows, casting="same_kind")
        return snapshot

    def give(self, snapshot: NDArray[Any]) -> None:
        """One user of the memory does not need it any more."""
        memory = snapshot.base
        assert isinstance(memory, np.ndarray)
        self._uses[id(memory)] -= 1
        if not self._uses[id(memory)]:
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
    joined = _joined(hosts) if whole else None
    if joined is not None:
        numbers[:] = joined
        hosts = []
    for batch, host in zip(asked, hosts, strict=False):
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


def _joined(hosts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """The batches' ids as one array, where they lie one after the other in one memory: one copy takes them all."""
    first = hosts[0]
    memory = first.base if first is not None else None
    if first is None or not isinstance(memory, np.ndarray):
        return None
    start = at = _offset(memory, first)
    for host in hosts:
        if host is None or host.base is not memory or _offset(memory, host) != at:
            return None
        at += host.size
    return memory[start:at]


def _offset(memory: NDArray[Any], part: NDArray[Any]) -> int:
    """Where ``part`` begins in ``memory``, in elements."""
    return (part.ctypes.data - memory.ctypes.data) // part.itemsize


def _evaluated(asked: Asked) -> NDArray[np.int64] | None:
    return asked.positions.rows() if asked.positions is not None else None


def _copy(device: Device, out: Tensor, rows: Tensor) -> None:
    device.launch("ids", lambda: out.copy_(rows), reads=[rows], writes=[out])
