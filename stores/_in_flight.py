"""What kernels still do with page-locked memory when the call that launched them has returned.

Guarantees:
- A kernel that reads runs after the kernels that wrote before it, on whatever streams; one that writes also after those
  that read. The host waits only where it touches the memory itself.

Assumes:
- One thread writes; any thread may read (see ``Store``). So nothing here needs a lock.
"""

from __future__ import annotations

import weakref
from typing import Any, final

from ._device_contract import Device


@final
class InFlight:
    """The last kernel that wrote a store's memory, and for each stream the last one that read it."""

    def __init__(self) -> None:
        self._written: Any = None  # an event; each write is ordered after the one before, so the last stands for all
        self._read: dict[Any, Any] = {}  # stream -> event; as many as streams that read

    def before_read(self, device: Device, stream: Any) -> None:
        """Order a read that is launched on ``stream`` next. The host does not wait."""
        if self._written is not None:
            device.wait(stream, self._written)

    def after_read(self, device: Device, stream: Any) -> None:
        """A read was launched on ``stream``."""
        self._read[stream] = device.record(stream)

    def before_write(self, device: Device, stream: Any) -> None:
        """Order a write that is launched on ``stream`` next. The host does not wait."""
        self.before_read(device, stream)
        for event in tuple(self._read.values()):
            device.wait(stream, event)

    def after_write(self, device: Device, stream: Any) -> None:
        """A write was launched on ``stream``."""
        self._written = device.record(stream)

    def wait_for_writes(self) -> None:
        """Block until the memory holds what was written: before the host reads it."""
        event = self._written
        if event is not None:
            event.synchronize()
            if self._written is event:
                self._written = None

    def wait_for_all(self) -> None:
        """Block until no kernel uses the memory: before the host writes it, and before it is given back."""
        self.wait_for_writes()
        for stream, event in tuple(self._read.items()):
            event.synchronize()
            if self._read.get(stream) is event:
                del self._read[stream]


class UsedByKernels:
    """What a store inherits: its ``InFlight``, made when a kernel first uses its memory, and waited for when it is dropped."""

    @final
    @property
    def in_flight(self) -> InFlight:
        """What kernels that ``read`` and ``scatter`` launched still do with ``memory``."""
        made = InFlight()
        found: InFlight = self.__dict__.setdefault("_in_flight", made)
        if found is made:  # a store that is dropped gives its memory back: not under a kernel
            weakref.finalize(self, made.wait_for_all).atexit = False
        return found

    @final
    def _settle(self, *, reading: bool = False) -> None:
        """Wait for kernels of ``read`` and ``scatter``, before the host writes ``memory``; before it is only ``reading``
        it, for those that write."""
        found: InFlight | None = self.__dict__.get("_in_flight")
        if found is not None:
            found.wait_for_writes() if reading else found.wait_for_all()
