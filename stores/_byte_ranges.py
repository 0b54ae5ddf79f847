"""Which requests fetch many small byte ranges of many objects: neighbours together, long runs in parts. Pure: no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

GAP = 64 << 10  # bytes between two ranges that are fetched with them: they cost less than one more request
REQUEST_BYTES = 2 << 20  # of one request: long enough for its way there and back, short enough that many share a piece of rows
REQUESTS_OF_A_CALL = 8


@final
class Records(NamedTuple):
    """Ranges of one width, and where their bytes go.

    Attributes:
        objects: ``(n,)``, int64, which object each is in; ascending.
        starts: ``(n,)``, int64, its first byte there; ascending within an object.
        out: ``(n, width)``, uint8; the bytes of a range lie together, ranges may lie apart.
    """

    objects: NDArray[np.int64]
    starts: NDArray[np.int64]
    out: NDArray[np.uint8]

    @property
    def width(self) -> int:
        return int(self.out.shape[1])

    def narrow(self) -> Iterator[Records]:
        """Records of at most ``REQUEST_BYTES``, of the same bytes."""
        for first in range(0, self.width, REQUEST_BYTES):
            yield Records(self.objects, self.starts + first, self.out[:, first : first + REQUEST_BYTES])


@final
class Call(NamedTuple):
    """Some requests to one object.

    Attributes:
        object: which.
        starts, stops: of each request.
        records: of all of them, as a span.
        places: of each record's first byte in the requests' bytes, one after the other.
    """

    object: int
    starts: list[int]
    stops: list[int]
    records: slice
    places: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return sum(self.stops) - sum(self.starts)


def calls_of(records: Records) -> Iterator[Call]:
    """The requests for ``records`` of at most ``REQUEST_BYTES``, each of up to about so many bytes, a few a call."""
    objects, starts, width = records.objects, records.starts, records.width
    if not starts.size or not width:
        return
    edge = np.concatenate(([True], (objects[1:] != objects[:-1]) | (starts[1:] - starts[:-1] > width + GAP)))
    run_start = starts[np.flatnonzero(edge)][np.cumsum(edge) - 1]
    part = (starts + (width - 1) - run_start) // REQUEST_BYTES  # of its run, so that no request gets too long
    edge[1:] |= part[1:] != part[:-1]
    firsts = np.flatnonzero(edge)
    ends = np.append(firsts[1:], starts.size)
    low, high = starts[firsts], starts[ends - 1] + width
    owner = objects[firsts]
    for begin, end in itertools.pairwise(_groups(owner, high - low)):
        span = slice(int(firsts[begin]), int(ends[end - 1]))
        lengths = high[begin:end] - low[begin:end]
        shift = np.cumsum(lengths) - lengths - low[begin:end]  # from a place in the object to one in the call's bytes
        places = starts[span] + np.repeat(shift, ends[begin:end] - firsts[begin:end])
        yield Call(int(owner[begin]), low[begin:end].tolist(), high[begin:end].tolist(), span, places)


def _groups(owner: NDArray[np.int64], nbytes: NDArray[np.int64]) -> list[int]:
    """Where calls begin among requests, and the end: each of one object, a few requests, or one long one."""
    begins, size = [0], 0
    for place, (new, length) in enumerate(zip((owner[1:] != owner[:-1]).tolist(), nbytes[:-1].tolist(), strict=True), start=1):
        size += length
        if new or place - begins[-1] == REQUESTS_OF_A_CALL or size + int(nbytes[place]) > REQUEST_BYTES:
            begins.append(place)
            size = 0
    return [*begins, owner.size]


def copy_records(data: bytes, places: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """``out[i]`` becomes the bytes of ``data`` from ``places[i]`` on, as many as it has."""
    width = out.shape[1]
    # An element for every byte that a record may start at: NumPy then copies records wherever they lie.
    everywhere: NDArray[Any] = np.ndarray((len(data) - width + 1,), f"V{width}", data, strides=(1,))
    out.view(f"V{width}")[:, 0] = everywhere[places]
