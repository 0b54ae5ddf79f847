"""What a test may set on the simulated device: what it leaves out, and how long work takes."""

from __future__ import annotations

from collections.abc import Callable

from ._simulated_queue import SimulatedEvent, SimulatedStream

Drop = Callable[[str, SimulatedStream, SimulatedEvent | None, int], bool]
Cost = Callable[[str, str, int], float]


def drop_nothing(kind: str, stream: SimulatedStream, event: SimulatedEvent | None, number: int) -> bool:
    """The ``drop`` of a device that does all it is asked."""
    del kind, stream, event, number
    return False


def a_millisecond(stream: str, name: str, nbytes: int) -> float:
    """The ``cost`` of a device on which all work takes as long."""
    del stream, name, nbytes
    return 1e-3
