"""What a pipeline tells about itself: snapshots of counts, times and memory."""

from __future__ import annotations

import os
from typing import final

from rowferry.stores._device_contract import Device

from ._counters import Counters
from ._run import Parts
from ._server import Server
from ._stats import Stats


@final
class Account:
    """Of one pipeline, also after it was closed. The user's thread.

    Args:
        parts: None for the mover ``local``.
    """

    def __init__(self, device: Device, counters: Counters, parts: Parts | None) -> None:
        self._counters = counters
        self._device = str(device.torch)
        self._capturing = device.capturing  # asking an event anything would break a capture of the user's
        self._timeline = parts.timeline if parts is not None else None
        self._link = self._timeline.link if self._timeline is not None else None
        self._depth = parts.settings.depth if parts is not None else 0
        self._parts = parts

    def stats(self, server: Server | None, **how: str) -> Stats:
        """A snapshot. ``server``: of the live epoch, if there is one; ``how`` rows cross: the fields about movers."""
        timeline, parts = self._timeline, self._parts
        pinned = 0
        if self._counters.overflow is not None and not self._capturing():
            self._counters.overflow.read()
            pinned = self._counters.overflow.nbytes
        if timeline is not None and parts is not None:
            timeline.settle()
            pinned += parts.pool.nbytes + timeline.tally.nbytes
            pinned += sum(mover.held() for movers in parts.movers for mover in movers)
        return self._counters.snapshot(
            depth=self._depth,
            device=self._device,
            link_gbps=self._link / 1e9 if self._link else None,
            bytes_staging=0 if parts is None else parts.arenas.nbytes,
            bytes_pinned=pinned,
            bytes_plans=0 if server is None or parts is None else server.plan_bytes(),
            **how,
        )

    def trace(self, path: str | os.PathLike[str], steps: int) -> None:
        """See ``Pipeline.trace``."""
        if self._timeline is None:
            raise RuntimeError(
                f"there is nothing to draw: the rows are in the memory of {self._device} already, so no thread and no stream "
                "brings them; mover='copy' makes a pipeline with both"
            )
        self._timeline.record(path, steps)

    def close(self) -> None:
        """The pipeline gives up its memory; what was counted stays."""
        self._parts = self._timeline = None
