"""What the pipeline asks of a device: streams, events, memory, and work in the order that events draw.

Three devices keep this contract: CUDA, the CPU (``_devices.py``) and the simulated one
(``testing/_simulated.py``), on which work really runs late. All code that orders streams is written against it, once.

Guarantees:
- Work on one stream runs in the order it was launched. Work on two streams is unordered, but for ``wait``.
- ``empty`` takes memory from the current stream's pool: usable at once on that stream; on another one only after
  a wait. When the last reference dies, the block may be used again at once by work on that stream, so a tensor
  used elsewhere must be given to ``keep``.

Assumes:
- ``launch`` runs ``fn`` at once or later, once. What ``fn`` reads and writes is listed, all of it, and ``fn`` launches
  nothing itself. Host memory in the lists stays alive and unchanged until an event after the launch has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch import dtype as Dtype  # a device has an attribute "torch", which hides the module in annotations


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work. Made by ``Device.record``, recorded once, and again only after ``Device.recycle``."""

    def query(self) -> bool:
        """Whether the work before it has run. Any thread, never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until ``query()``; releases the GIL."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``; both passed, both recorded with ``timing``."""


class Device(Protocol):
    """See the module's guarantees. Every method may be called from any thread unless it says otherwise."""

    torch: torch.device
    """The torch device, with its index."""

    is_cuda: bool
    """Whether kernels for CUDA can run here."""

    asynchronous: bool
    """Whether launched work may run after ``launch`` returns."""

    def stream(self, name: str, *, high_priority: bool = False) -> Any:
        """A new stream. ``name`` is for traces."""

    def current(self) -> Any:
        """The calling thread's current stream. Equal for equal streams."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the calling thread's current one inside the block (and this device the current one)."""

    def record(self, stream: Any, *, timing: bool = False) -> Event:
        """A new event after all that was launched on ``stream`` so far; with ``timing`` it knows when it passed."""

    def recycle(self, event: Event) -> None:
        """Nobody asks ``event`` anything any more, and it was recorded with ``timing``: a later ``record`` may use it anew."""

    def now(self) -> float:
        """Seconds of the host's clock, from any start."""

    def wait(self, stream: Any, event: Event) -> None:
        """What is launched on ``stream`` from now on runs after ``event``. Never blocks the host."""

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Uninitialised device memory, allocated on the current stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host bytes (uint8, 1-d) that the caller owns; ordinary memory where there is no CUDA."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """``tensor``'s memory is not used again before the work on ``stream`` up to its death has passed."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in this device's memory already."""

    def launch(self, name: str, fn: Callable[[], Any], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Run ``fn`` on the current stream. ``fn`` works on tensors that exist already and returns nothing."""

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Bytes of ``source`` to ``out`` on the current stream, either of them in pinned host memory. Same shape and dtype."""

    def host_reads(self, tensor: Tensor) -> None:
        """The calling thread is about to read ``tensor``, pinned memory of this device. Only the simulated one cares."""

    def host_writes(self, tensor: Tensor) -> None:
        """The calling thread is about to write ``tensor``, pinned memory of this device. Only the simulated one cares."""

    def free_bytes(self) -> int:
        """Bytes that an allocation could get now, blocks that torch holds unused included."""

    def link_rate(self) -> float | None:
        """Bytes a second that the copy engine brings from pinned memory, measured once a process, which blocks for some
        10 ms; None where nothing crosses a link."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def enter_thread(self) -> None:
        """Called once at the start of each thread of ours.

        Sets the thread's device, and lets a user's graph capture live beside it.
        """
