"""Numbers that only the device knows, on their way to the host: copied to pinned words, read once their event has passed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowferry.stores._device_contract import Device, Event

from ._staging import typed

BLOCK_BYTES = 4096  # one page of words; more are taken should they ever not do


class _Sent(NamedTuple):
    event: Event
    word: Tensor
    then: Callable[[int], None]


@final
class Tally:
    """Words in flight. Any thread sends and reads, in turns by ``lock``; nothing ever waits for the device."""

    def __init__(self, device: Device) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self._device = device
        self._blocks: list[Tensor] = []
        self._free: list[Tensor] = []
        self._sent: list[_Sent] = []
        self._extend()

    @property
    def nbytes(self) -> int:
        """Pinned bytes held."""
        return BLOCK_BYTES * len(self._blocks)

    def send(self, stream: Any, number: Tensor, then: Callable[[int], None]) -> Event:
        """The ``read`` that finds ``number`` calls ``then`` with it. Returns the event after which it does.

        ``number`` is int64 ``(1,)``, ready on ``stream``, which is current.
        """
        with self.lock:
            if not self._free:
                self._extend()
            word = self._free.pop()
        self._device.copy(word, number)
        event = self._device.record(stream)
        with self.lock:
            self._sent.append(_Sent(event, word, then))
        return event

    def send_count(self, stream: Any, marks: Tensor, then: Callable[[int], None]) -> Event:
        """The same with the number of ``marks`` (uint8, 0 or 1) that are set."""
        total = self._device.empty((1,), torch.int64)
        self._device.launch(
            "tally", lambda: torch.sum(marks, 0, keepdim=True, dtype=torch.int64, out=total), reads=[marks], writes=[total]
        )
        return self.send(stream, total, then)

    def read(self) -> None:
        """Hand out what has arrived."""
        if not self._sent:
            return
        with self.lock:
            sent, self._sent = self._sent, []
            for entry in sent:
                if not entry.event.query():
                    self._sent.append(entry)
                    continue
                self._device.host_reads(entry.word)
                entry.then(int(entry.word.item()))
                self._free.append(entry.word)

    def _extend(self) -> None:
        block = self._device.pinned(BLOCK_BYTES)
        self._blocks.append(block)
        words = typed(block, torch.int64, (BLOCK_BYTES // 8,))
        self._free.extend(words[place : place + 1] for place in range(len(words)))
