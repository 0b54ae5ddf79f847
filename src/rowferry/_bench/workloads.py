"""What is asked for: index batches, uniform or Zipf, and a sampler that hands them out at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
Ring = list[Index]

ZIPF_EXPONENT = 1.05
_RING_IDS = 8 << 20  # ids of a ring; a window that had one batch twice would fetch it once
_SHUFFLE = 2_654_435_761  # an odd number of no pattern; made coprime to the number of rows below


@final
class Batches:
    """``count`` index batches, those of ``ring`` in turn: an array-yielding batch sampler that costs nothing.

    ``count`` may be changed between epochs.
    """

    def __init__(self, ring: Ring, count: int) -> None:
        self.ring, self.count = ring, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Index]:
        return (self.ring[number % len(self.ring)] for number in range(self.count))


def ring_length(batch: int) -> int:
    """Batches enough that no window holds one twice: 64 or more, 1,024 at most."""
    return max(64, min(1024, _RING_IDS // batch))


def uniform(rows: int, batch: int, distinct: int, seed: int = 0) -> Ring:
    """``distinct`` batches of uniform random rows."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, rows, batch) for _ in range(distinct)]


def truncated_zipf(rows: int, batch: int, distinct: int, exponent: float = ZIPF_EXPONENT, seed: int = 0) -> Ring:
    """Ranks k = 1..rows with P(k) in proportion to k**-exponent, spread over the rows so that frequent ones lie apart.

    With a = exponent and u uniform in [0, 1), the rank is the floor of ((rows**(1-a) - 1) u + 1)**(1/(1-a)): the inverse
    of the continuous distribution between 1 and ``rows``. Rank k is row (k - 1) * p mod rows, p coprime to rows.
    """
    rng = np.random.default_rng(seed)
    factor = _SHUFFLE
    while np.gcd(factor, rows) != 1:
        factor += 2
    power = 1 - exponent
    span = rows**power - 1
    ranks = ((span * rng.random(batch) + 1) ** (1 / power) for _ in range(distinct))
    return [(np.clip(rank.astype(np.int64) - 1, 0, rows - 1) * factor) % rows for rank in ranks]


def apart(rows: int, batch: int, most: int, seed: int = 1) -> Ring:
    """At most ``most`` batches that share no row, and hold none twice; one at least, of ``min(rows, batch)`` rows."""
    batch = min(rows, batch)
    count = max(min(rows // batch, most), 1)
    order = np.random.default_rng(seed).permutation(rows)[: batch * count]
    return [np.ascontiguousarray(order[start : start + batch]) for start in range(0, len(order), batch)]
