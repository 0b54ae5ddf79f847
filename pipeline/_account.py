"""What a pipeline tells about itself: snapshots of counts, times and memory, and a line in the log at each epoch's end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from rowferry.stores._device_contract import Device

from ._candidates import LOCAL, ways
from ._counters import Counters
from ._overflow import Overflow
from ._run import Parts
from ._server import Server
from ._source import Source
from ._stats import Stats

logger = logging.getLogger("rowferry")


@final
class Account:
    """Of one pipeline, also after it was closed. The user's thread.

    Args:
        parts: None for the mover ``local``.
    """

    def __init__(
        self, device: Device, counters: Counters, source: Source, parts: Parts | None, overflow: Overflow | None
    ) -> None:
        self._counters = counters
        self._device = str(device.torch)
        self._capturing = device.capturing  # asking an event anything would break a capture of the user's
        self._source = source
        self._ways = LOCAL
        self._timeline = parts.timeline if parts is not None else None
        self._depth = parts.settings.depth if parts is not None else 0
        self._parts = parts
        self._overflow = overflow

    def stats(self, server: Server | None) -> Stats:
        """A snapshot. ``server``: of the live epoch, if there is one."""
        timeline, parts = self._timeline, self._parts
        pinned = 0
        if self._overflow is not None and not self._capturing():
            self._overflow.read()
            pinned = self._overflow.nbytes
        if parts is not None:
            self._ways = ways(self._source, parts.movers)
        if timeline is not None and parts is not None:
            timeline.settle()
            pinned += parts.pool.nbytes + timeline.tally.nbytes
            pinned += sum(mover.held() for movers in parts.movers for mover in movers)
        return self._counters.snapshot(
            depth=self._depth,
            mover=self._ways.names,
            mover_why=self._ways.why,
            device=self._device,
            link_gbps=timeline.link / 1e9 if timeline is not None and timeline.link else None,
            bytes_staging=0 if parts is None else parts.arenas.nbytes,
            bytes_pinned=pinned,
            bytes_plans=0 if server is None or parts is None else server.plan_bytes(),
        )

    def epoch_begins(self, number: int) -> Callable[[], None]:
        """What to call when epoch ``number`` is over: its own verdict goes to the log, once."""
        before = self.stats(None)
        return lambda: logger.info("epoch %d: %s", number, self.stats(None).since(before).verdict)

    def close(self) -> None:
        """The pipeline gives up its memory; what was counted stays, and how rows crossed."""
        if self._parts is not None:
            self._ways = ways(self._source, self._parts.movers)
        self._parts = None
