"""Writing rows back: writing only, and reading, changing and writing; timed to the end of ``flush()``, then checked."""

from __future__ import annotations

from typing import Any, Self, final

import torch

from rowferry.pipeline import Pipeline
from rowferry.stores import Store
from rowferry.stores._devices import device_for

from .clock import Timing, clock, idle
from .workloads import Batches, Ring

_CHECKED_ROWS = 256


@final
class Writing:
    """A pipeline that writes each batch of ``ring`` back; a ``Run`` when called.

    Args:
        store: any but bool rows.
        ring: batches that share no row.
        fetch: read and add one to each value first; else all values become one number.
    """

    def __init__(self, store: Store, ring: Ring, device: torch.device, *, fetch: bool, **settings: Any) -> None:
        self._store, self._ring, self._fetch = store, ring, fetch
        self._device = device_for(device)
        self._items = Batches(ring, 1)
        self._values = torch.full((len(ring[0]), *store.row_shape), 7, dtype=store.dtype, device=device)
        self._visits = [0] * len(ring)
        self._before = [store.gather(index[:_CHECKED_ROWS]) for index in ring[:2]]
        self.pipe = Pipeline(store, batch_sampler=self._items, device=device, writable=True, fetch=fetch, **settings)

    def __call__(self, count: int, stop: float) -> Timing:
        """``count`` batches, from ``iter()`` until ``flush()`` has returned."""
        self._items.count = count
        idle(self._device)
        taken, start = 0, clock()
        batch: Any
        for batch in self.pipe:
            if self._fetch:
                batch.values.add_(1)
                batch.write_back()
            else:
                batch.write_back(self._values)
            self._visits[taken % len(self._ring)] += 1
            taken += 1
            if clock() >= stop:
                break
        self.pipe.flush()
        idle(self._device)
        return Timing(taken, clock() - start)

    def check(self) -> None:
        """The store holds what was written since this was made: the first rows of the first two batches are compared.

        Raises:
            AssertionError: it does not.
        """
        for index, before, visits in zip(self._ring, self._before, self._visits, strict=False):
            expected = before.clone()
            if self._fetch:
                for _ in range(visits):  # one by one, since half-precision sums depend on the order
                    expected.add_(1)
            elif visits:
                expected.fill_(7)
            if not torch.equal(self._store.gather(index[:_CHECKED_ROWS]), expected):
                raise AssertionError(f"{self._store.name} does not hold the rows that were written back to it")

    def close(self) -> None:
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
