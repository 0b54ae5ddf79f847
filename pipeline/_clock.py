"""When streams were where, on the host's clock. Nothing here waits for the device.

CUDA tells only the time between two events. An *anchor* is an event on a stream that is always idle, recorded when the
host's clock was read: the time from it to an event, added to that reading, is when the event passed.
"""

from __future__ import annotations

from typing import Any, final

from rowferry.stores._device_contract import Device, Event

ANCHOR_SECONDS = 10.0  # an elapsed time has 24 bits: over ten seconds it is exact to a microsecond


@final
class Clock:
    """Timing events of one device. ``mark`` and ``now`` from any thread, the rest from one.

    Attributes:
        now: the host's clock, in seconds.
    """

    def __init__(self, device: Device) -> None:
        self.now = device.now
        self._device = device
        self._stream = device.stream("clock", high_priority=True)
        self._anchor: tuple[Event, float] | None = None  # passed
        self._next: tuple[Event, float] | None = None  # recorded, not known to have passed

    def mark(self, stream: Any) -> Event:
        """A timing event after what was launched on ``stream`` so far. To be given to ``free`` when it was read."""
        return self._device.record(stream, timing=True)

    def free(self, *events: Event) -> None:
        """Nobody reads these marks any more."""
        for event in events:
            self._device.recycle(event)

    def ready(self) -> bool:
        """Whether times can be read now. Sees to a fresh anchor."""
        if self._next is None and (self._anchor is None or self.now() - self._anchor[1] > ANCHOR_SECONDS):
            self._next = (self.mark(self._stream), self.now())
        if self._next is not None and self._next[0].query():
            if self._anchor is not None:
                self.free(self._anchor[0])
            self._anchor, self._next = self._next, None
        return self._anchor is not None

    def at(self, event: Event) -> float:
        """When ``event``, which has passed, did so. Only while ``ready()``."""
        assert self._anchor is not None
        anchor, since = self._anchor
        return since + anchor.elapsed_time(event) * 1e-3

    def not_before(self, event: Event, since: float) -> None:
        """``event`` was recorded at ``since``, so it passed later: an anchor that was late itself is corrected by that."""
        assert self._anchor is not None
        if (late := since - self.at(event)) > 0:
            self._anchor = (self._anchor[0], self._anchor[1] + late)
