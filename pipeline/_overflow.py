"""Counts finite values that a cast made infinite, where the cast happens: on the device.

Opt-in (``count_inf=True``): the count reads every cast value once more, source and result, which costs a batch of float32
rows cast to float16 about half of its serve again, and three launches.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from rowferry.stores._device_contract import Device

from ._tally import Tally


@final
class Overflow:
    """One running count on the device, of one pipeline. The consumer's thread, in the order of its streams.

    Attributes:
        counted: as far as it has come to the host.
    """

    def __init__(self, device: Device) -> None:
        self.counted = 0
        self._device = device
        self._tally = Tally(device)
        self._total: Tensor | None = None
        self._stream: Any = None  # where it was last used

    def total(self) -> Tensor:
        """The count, int64 ``(1,)``, for a launch that adds to it (reads and writes it) on the current stream."""
        device, current = self._device, self._device.current()
        if self._total is None:
            self._total = total = device.empty((1,), torch.int64)
            device.launch("zero", lambda: total.zero_(), writes=[total])
        elif current != self._stream:
            device.wait(current, device.record(self._stream))
            device.keep(self._total, current)  # a batch may be looked up after the pipeline is gone
        self._stream = current
        return self._total

    def add(self, source: Tensor, result: Tensor) -> None:
        """``result`` is ``source`` cast, on the current stream."""
        total = self.total()
        self._device.launch(
            "count inf", lambda: total.add_(made_inf(source, result)), reads=[source, result, total], writes=[total]
        )

    def send(self, stream: Any) -> None:
        """The count so far goes to the host, when ``stream``, the current one, has come here."""
        if self._total is not None:
            self._tally.send(stream, self.total(), self._arrived)
            self.read()

    def read(self) -> None:
        """See what has arrived."""
        self._tally.read()

    def _arrived(self, count: int) -> None:
        self.counted = count

    @property
    def nbytes(self) -> int:
        """Pinned bytes held."""
        return self._tally.nbytes


def made_inf(source: Tensor, result: Tensor) -> Tensor:
    """How many values are infinite in ``result`` and not in ``source``; int64, 0-d. NaN stays NaN and does not count."""
    if not result.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=result.device)
    if result.itemsize == 1:
        result = result.to(torch.float32)  # torch does not ask float8 whether it is inf
    return (result.isinf() & ~source.isinf()).sum()
