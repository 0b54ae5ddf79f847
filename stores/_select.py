"""A part of every row: what ``select=`` means, and which pieces of which chunks it is made of. Pure: no I/O."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

Box = tuple[slice, ...]
"""One slice a dimension, with start, stop and a positive step."""


class Piece(NamedTuple):
    """The part of a row in one chunk: the chunk's place in the grid of the row's dimensions, and the part inside the
    chunk and inside the selected row."""

    chunk: tuple[int, ...]
    inside: Box
    target: Box


@final
@dataclass(frozen=True)
class Selection:
    """A part of a row of ``row_shape``: ``row[box]``, with dimensions that an int picked removed.

    Attributes:
        box: what is kept, a slice for each dimension of the row.
        shape: of the part that users see.
        whole: nothing is left out.
    """

    row_shape: tuple[int, ...]
    box: Box
    dropped: tuple[bool, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each dimension of the row, those of one element included that ``shape`` leaves out."""
        return tuple(len(range(each.start, each.stop, each.step)) for each in self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for n, dropped in zip(self.lengths, self.dropped, strict=True) if not dropped)

    @property
    def whole(self) -> bool:
        return self.lengths == self.row_shape and not any(self.dropped)

    @property
    def key(self) -> tuple[int | slice, ...]:
        """As an index of a row: ints where a dimension is removed."""
        return tuple(each.start if dropped else each for each, dropped in zip(self.box, self.dropped, strict=True))

    def pieces(self, chunk: Sequence[int]) -> Iterator[Piece]:
        """The pieces of a row in a grid of chunks of this shape (of the row's dimensions), each chunk once."""
        along = [list(_along(each, size)) for each, size in zip(self.box, chunk, strict=True)]
        for parts in itertools.product(*along):
            yield Piece(tuple(p[0] for p in parts), tuple(p[1] for p in parts), tuple(p[2] for p in parts))


def selection_of(select: Any, row_shape: tuple[int, ...], name: str) -> Selection:
    """What ``select`` picks of each row, as NumPy's basic indexing of one row does.

    Args:
        select: None for all; an int, a slice with a positive step, ``...``, or a tuple of them.
        row_shape: of the whole row.
        name: what errors call the store.

    Raises:
        IndexError: more parts than dimensions, or an int out of range. TypeError: another kind of part.
        ValueError: a step that is not positive.
    """
    parts = list(select) if isinstance(select, tuple) else [] if select is None else [select]
    holes = sum(part is Ellipsis for part in parts)
    if holes > 1 or len(parts) - holes > len(row_shape):
        raise IndexError(f"select={select!r} does not fit a row of {name}, which has shape {row_shape}")
    at = next((place for place, part in enumerate(parts) if part is Ellipsis), len(parts))
    free = [slice(None)] * (len(row_shape) - len(parts) + holes)
    parts = [*parts[:at], *free, *parts[at + 1 :]]
    box = tuple(_slice(part, n, name) for part, n in zip(parts, row_shape, strict=True))
    return Selection(row_shape, box, tuple(not isinstance(part, slice) for part in parts))


def refuse_to_write(select: Any, mode: str) -> None:
    """Raise ValueError where a part of each row is asked for together with writing."""
    if select is not None and mode != "r":
        raise ValueError("select= is for reading: open the whole rows to write, or pass mode='r'")


def _slice(part: Any, n: int, name: str) -> slice:
    if isinstance(part, slice):
        start, stop, step = part.indices(n)
        if step <= 0:
            raise ValueError(f"select has a step of {step} for {name}; steps must be positive")
        return slice(start, max(stop, start), step)
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise TypeError(f"select has {part!r} for {name}; its parts must be ints, slices or '...'")
    at = operator.index(part)
    if not -n <= at < n:
        raise IndexError(f"select has {at} for a dimension of length {n} of a row of {name}")
    return slice(at % n, at % n + 1, 1)


def _along(wanted: slice, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Chunks of one dimension that hold a part of ``wanted``: number, the part inside it, its place in what is wanted."""
    found = range(wanted.start, wanted.stop, wanted.step)
    done = 0
    while done < len(found):
        number = found[done] // size
        stop = len(range(wanted.start, min(wanted.stop, (number + 1) * size), wanted.step))
        first, last = found[done] - number * size, found[stop - 1] - number * size
        yield number, slice(first, last + 1, wanted.step), slice(done, stop, 1)
        done = stop
