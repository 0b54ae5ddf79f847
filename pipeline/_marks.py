"""The marks of changed rows: uint8 ``(d,)`` a column of a slot, nonzero where a row must still reach the store.

Each function is one or two launches on the current stream. The tensors are variables of their own here, since a
launched function must hold them itself, whatever the caller's loop does meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rowferry.stores._device_contract import Device


def clear(device: Device, marks: Tensor) -> None:
    """No row is marked."""
    device.launch("clear", lambda: marks.zero_(), writes=[marks])


def mark(device: Device, marks: Tensor, places: Tensor) -> None:
    """The rows at ``places`` are changed."""
    device.launch("mark", lambda: marks.index_fill_(0, places, 1), reads=[places, marks], writes=[marks])


def take(device: Device, marks: Tensor, spared: Tensor | None = None) -> Tensor:
    """A list (fresh marks) of all that is marked but the places ``spared``; what is listed is no longer marked."""
    listed = device.empty(marks.shape, marks.dtype)
    device.launch("list", lambda: listed.copy_(marks), reads=[marks], writes=[listed])
    if spared is not None:
        device.launch("spare", lambda: listed.index_fill_(0, spared, 0), reads=[spared, listed], writes=[listed])
    device.launch("clear", lambda: marks.sub_(listed), reads=[listed, marks], writes=[marks])
    return listed


def carry(device: Device, marks: Tensor, places: Tensor, target: Tensor) -> None:
    """Marks go to the slot of the next window with their rows: ``target = marks[places]``, and ``marks`` is cleared."""
    device.launch(
        "carry marks", lambda: torch.index_select(marks, 0, places, out=target), reads=[marks, places], writes=[target]
    )
    clear(device, marks)


def count(device: Device, marks: Tensor) -> int:
    """How many are marked. Blocks until the work on the current stream has passed."""
    total = device.empty((1,), torch.int64)
    device.launch("count", lambda: total.copy_(marks.sum()), reads=[marks], writes=[total])
    device.record(device.current()).synchronize()
    return int(total.item())
