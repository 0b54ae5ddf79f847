"""A machine whose link and host are as fast as a test says: a simulated device in simulated time, and pipelines on it."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from rowferry.pipeline.loader import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import CostlyStore, SimulatedDevice

from ._timed_host import TimedHost

ROWS: Final = 8_192
WIDTH: Final = 32
BATCH: Final = 128


@final
class Machine:
    """A simulated device with rates in GB/s, and a count of the bytes that each kind of work moved.

    Attributes:
        kernel: how fast a kernel reads and writes over the bus; ``engine``: the copy engine; ``host``: a host thread.
    """

    def __init__(self, *, kernel: float, host: float, engine: float = 50.0) -> None:
        self.kernel, self.host, self.engine = kernel, host, engine
        self.moved: Counter[str] = Counter()
        self.device = SimulatedDevice(free_bytes=64 << 20)
        self.device.cost = self._cost

    def store(self, memory: Tensor) -> CostlyStore:
        """Rows in ``memory``, that host threads read and write at their rate."""
        read, write = functools.partial(self._by_host, "gathered"), functools.partial(self._by_host, "scattered")
        return CostlyStore(ArrayStore(memory), read=read, write=write, in_memory=True)

    def pipeline(self, source: Any, **keywords: Any) -> Pipeline:
        """By default over random batches, some of whose rows repeat, in windows of one batch."""
        settings = {
            "batch_sampler": random_batches(),
            "lookahead": 1,
            "depth": 2,
            "staging_bytes": 1 << 20,
        }
        pipe = Pipeline(source, device=self.device, **{**settings, **keywords})  # type: ignore[arg-type]  # simulated
        pipe._new_host = lambda: TimedHost(self.device)
        return pipe

    def _by_host(self, what: str, nbytes: int) -> None:
        self.moved[what] += nbytes
        self.device.spend(nbytes / self.host / 1e9)

    def _cost(self, stream: str, name: str, nbytes: int) -> float:
        if name in ("fetch", "drain") or (name == "copy" and stream in ("fetch", "writer")):
            self.moved[f"{name} on {stream}"] += nbytes
        rates = {"fetch": self.kernel, "drain": self.kernel, "copy": self.engine}
        return nbytes / rates[name] / 1e9 if name in rates else 0.0


def random_batches() -> list[Any]:
    """Forty batches of ``BATCH`` rows, some of which repeat."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, ROWS, BATCH) for _ in range(40)]


def table(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    """``ROWS`` random rows."""
    return torch.randn(ROWS, width, dtype=dtype, generator=torch.Generator().manual_seed(0))


def read_all(pipe: Pipeline, *, windows: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Index and rows of each batch, up to so many windows."""
    found = []
    for batch in pipe:
        index, rows = torch.empty_like(batch.index), torch.empty_like(batch.data)
        device = pipe._place
        device.launch("note", functools.partial(Tensor.copy_, index, batch.index), reads=[batch.index])
        device.launch("note", functools.partial(Tensor.copy_, rows, batch.data), reads=[batch.data])
        found.append((index, rows))
        if windows is not None and pipe.stats().windows == windows:
            break
    pipe._place.drain()  # type: ignore[attr-defined]  # a simulated device
    return found
