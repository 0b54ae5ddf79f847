"""Rows of an uncompressed zarr array, by their byte ranges: nothing is decoded and no other row is touched.

Whole rows that lie on disk as in memory are read by one NumPy call for thousands of files, straight into the output; long
runs of them by one call of the system each.
Others (chunks split along a row, a part of each row, Fortran order, foreign byte order) take a call a chunk.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
import zarr
from numpy.typing import NDArray

from ._rows import as_slice, ascending, distinct_places, is_ascending, spans_of
from ._select import Box, Selection
from ._zarr_files import ChunkFiles, Medium
from ._zarr_layout import RawLayout
from ._zarr_runs import RunReader

_WIDEST_RECORD = 1 << 20  # as in _bytes: wider rows are copied as fast in two dimensions


class Part(NamedTuple):
    """A piece of every row: its chunk's place inside a file, what is taken of the chunk, and where it goes."""

    chunk: int
    inside: Box
    target: Box


@final
class RangeReader:
    """Reads rows of one array, or a part of each. Any thread, several at once.

    Args:
        array: as it is now; the reader is for this shape.
        layout: of it.
        medium: where its files come from.
        selection: what to read of each row.
        strict: a file that does not exist is a FileNotFoundError.
        name: what errors call the array.
    """

    def __init__(
        self, array: zarr.Array[Any], layout: RawLayout, medium: Medium, selection: Selection, *, strict: bool, name: str
    ) -> None:
        self._layout = layout
        self._strict = strict
        self._name = name
        self._selection = selection
        self._key_of = keys_of(array, layout)
        self._columns = math.prod(layout.file_grid)
        self._files = ChunkFiles(medium, layout, self._key_of, name)
        self._row_nbytes = math.prod(layout.shape[1:]) * layout.stored.itemsize
        index = layout.index
        # All whole rows of all files are the records of one array, since files and chunks start at whole records.
        self._phase = index.nbytes % self._row_nbytes if index is not None and index.at_start else 0
        self._records = self._as_records(self._files.memory[self._phase :]) if layout.plain and selection.whole else None
        self._runs = self._run_reader(medium.root)
        self._parts = parts_of(layout, selection)

    @property
    def whole(self) -> bool:
        """Rows lie on disk as in memory, so that many are read by one call, in any order."""
        return self._records is not None

    @property
    def from_disk(self) -> bool:
        """Whether a disk was asked for rows that were read last."""
        return self._files.from_disk or (self._runs is not None and self._runs.from_disk)

    def invalidate(self, places: NDArray[np.int64] | None = None) -> None:
        """Files may have been replaced: those at ``places`` (numbers of shards, or chunks, along the rows), or all."""
        if places is None:
            self._files.invalidate()
        else:
            self._files.invalidate(
                place * self._columns + column for place in places.tolist() for column in range(self._columns)
            )

    def gather(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        """``target[i]`` becomes row ``rows[i]``.

        Args:
            rows: in range, any order, repeats allowed.
            target: ``(len(rows), *selection.shape)``, C order, elements of the stored size, native.

        Raises:
            FileNotFoundError: strict, and a chunk's file is missing. OSError: a file is cut off, or broken.
            Unmappable: the rows must be read in another way.
        """
        if self._runs is None or not self._runs.gather(rows, target.reshape(-1).view(np.uint8)):
            self._gather_mapped(rows, target)

    def _gather_mapped(self, rows: NDArray[np.int64], target: NDArray[Any]) -> None:
        records = self._records
        files, which = distinct_places(rows // self._layout.outer[0])
        if records is not None and files.size <= self._files.most:
            if not self._gather_records(rows, files, which, self._as_records(target.reshape(-1).view(np.uint8))):
                self._records = None  # some other program's shards: chunks start anywhere
                self._gather_mapped(rows, target)
        elif not is_ascending(rows):
            distinct, inverse = ascending(rows)
            found = np.empty((distinct.size, *target.shape[1:]), target.dtype)
            self._gather_mapped(distinct, found)
            assert inverse is not None
            np.take(found, inverse, axis=0, out=target, mode="clip")
        elif records is not None:
            for start, stop in spans_of(which, self._files.most):
                self._gather_mapped(rows[start:stop], target[start:stop])
        else:
            whole = target.reshape(len(rows), *self._selection.lengths)
            for column, parts in self._parts.items():
                for start, stop in spans_of(which, self._files.most):
                    self._gather_parts(rows[start:stop], column, parts, whole[start:stop])

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Have the disk fetch the files that many of these rows (at least one) lie in."""
        if self._runs is not None:
            self._runs.expect(rows)

    # ---- whole rows --------------------------------------------------------------------------------------------

    def _gather_records(
        self, rows: NDArray[np.int64], files: NDArray[np.int64], which: NDArray[np.int64], out: NDArray[Any]
    ) -> bool:
        """False when the rows are no records, because a shard's chunks do not start at whole rows."""
        records_of_all = self._records
        assert records_of_all is not None
        with self._files.hold(files) as slots:
            self._require_all(files, slots)
            starts = self._starts(rows, slots[which], 0, 1)
            there = starts >= 0
            whole = bool(there.all())
            starts = starts if whole else starts[there]
            starts += (rows if whole else rows[there]) % self._layout.chunk[0] * self._row_nbytes
            if starts.size:
                self._files.will_need(starts, starts + self._row_nbytes)
            records, odd = np.divmod(starts - self._phase, self._row_nbytes)
            if odd.any():
                return False
            if not whole:
                out[there] = records_of_all[records]
            elif (span := as_slice(records)) is not None:
                np.copyto(out, records_of_all[span])
            else:
                np.take(records_of_all, records, axis=0, out=out, mode="clip")  # any other mode fills a buffer first
        if not whole:
            out[~there] = self._as_records(self._fill_row())
        return True

    def _run_reader(self, root: str | None) -> RunReader | None:
        """For files of a folder that are a chunk each, of whole rows."""
        layout = self._layout
        if root is None or self._records is None or layout.index is not None:
            return None
        return RunReader(root, layout, self._key_of, None if self._strict else self._fill_row(), self._name)

    def _fill_row(self) -> NDArray[np.uint8]:
        layout = self._layout
        return np.full(layout.shape[1:], layout.fill, layout.stored).reshape(-1).view(np.uint8)

    def _as_records(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Bytes as rows, an opaque element each; a rest is left out."""
        memory = memory[: memory.size // self._row_nbytes * self._row_nbytes]
        if self._row_nbytes > _WIDEST_RECORD:
            return memory.reshape(-1, self._row_nbytes)
        return memory.view(f"V{self._row_nbytes}")

    # ---- rows in parts -----------------------------------------------------------------------------------------

    def _gather_parts(self, rows: NDArray[np.int64], column: int, parts: list[Part], out: NDArray[Any]) -> None:
        """The parts of ascending ``rows`` that are in one column of files."""
        layout = self._layout
        places, which = distinct_places(rows // layout.outer[0])
        files = places * self._columns + column
        firsts = np.flatnonzero(np.diff(rows // layout.chunk[0], prepend=-1))
        ends = np.append(firsts[1:], rows.size)
        inside = rows % layout.chunk[0]
        columns = math.prod(layout.inner_grid[1:])
        with self._files.hold(files) as slots:
            self._require_all(files, slots)
            starts = [self._starts(rows, slots[which], part.chunk, columns) for part in parts]
            self._need(starts, inside, parts)
            for part, begin in zip(parts, starts, strict=True):
                for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
                    place = (slice(first, end), *part.target)
                    if begin[first] < 0:
                        out[place] = layout.fill
                        continue
                    chosen = inside[first:end]
                    picked: Any = as_slice(chosen)
                    np.copyto(out[place], self._chunk(int(begin[first]))[(chosen if picked is None else picked, *part.inside)])

    def _chunk(self, start: int) -> NDArray[Any]:
        """A chunk where it lies."""
        layout = self._layout
        flat = self._files.memory[start : start + layout.chunk_nbytes].view(layout.stored)
        stored = flat.reshape([layout.chunk[axis] for axis in layout.axes])
        return stored.transpose(np.argsort(layout.axes))

    def _need(self, starts: list[NDArray[np.int64]], inside: NDArray[np.int64], parts: list[Part]) -> None:
        """Ask for the pages of what will be copied: of rows that lie together those, else whole chunks."""
        layout = self._layout
        lows, highs = [], []
        for begin, part in zip(starts, parts, strict=True):
            there = begin >= 0
            low, high = begin[there], begin[there] + layout.chunk_nbytes
            if layout.rows_first:
                first, last = extent_of(layout, part.inside)
                low = low + inside[there] * (layout.chunk_nbytes // layout.chunk[0])
                low, high = low + first, low + last
            lows.append(low)
            highs.append(high)
        low, high = np.concatenate(lows), np.concatenate(highs)
        if low.size:
            self._files.will_need(low, high)

    # ---- both --------------------------------------------------------------------------------------------------

    def _starts(self, rows: NDArray[np.int64], slots: NDArray[np.int64], column: int, columns: int) -> NDArray[np.int64]:
        """Where the chunk of each row starts, the one at ``column`` of ``columns`` along the row; -1 where there is none."""
        chunk = rows % self._layout.outer[0] // self._layout.chunk[0]
        found: NDArray[np.int64] = self._files.places[slots, chunk * columns + column]
        return found

    def _require_all(self, files: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        if self._strict and bool((slots < 0).any()):
            raise missing_chunk(self._key_of(int(files[slots < 0][0])), self._name)


def keys_of(array: zarr.Array[Any], layout: RawLayout) -> Callable[[int], str]:
    """What gives the key of a file by its number: those of one place along the rows follow one another, in C order."""
    metadata: Any = array.metadata
    prefix = f"{array.path}/" if array.path else ""
    grid, columns = layout.file_grid, math.prod(layout.file_grid)

    def key(file: int) -> str:
        place, column = divmod(file, columns)
        along = tuple(map(int, np.unravel_index(column, grid))) if columns > 1 else (0,) * len(grid)
        return prefix + str(metadata.encode_chunk_key((place, *along)))

    return key


def missing_chunk(key: str, name: str) -> FileNotFoundError:
    """What ``strict`` raises."""
    return FileNotFoundError(
        errno.ENOENT, f"chunk {key!r} of {name} is missing; without strict=True it reads as the fill value"
    )


def parts_of(layout: RawLayout, selection: Selection) -> dict[int, list[Part]]:
    """The parts of a selected row, by column of files."""
    inner = layout.inner_grid[1:]
    found: dict[int, list[Part]] = {}
    for piece in selection.pieces(layout.chunk[1:]):
        file = [place // n for place, n in zip(piece.chunk, inner, strict=True)]
        chunk = [place % n for place, n in zip(piece.chunk, inner, strict=True)]
        column = int(np.ravel_multi_index(file, layout.file_grid)) if file else 0
        within = int(np.ravel_multi_index(chunk, inner)) if chunk else 0
        found.setdefault(column, []).append(Part(within, piece.inside, piece.target))
    return found


def extent_of(layout: RawLayout, inside: Box) -> tuple[int, int]:
    """First and last byte (exclusive) of a part inside a chunk's row that lies together."""
    first = last = 0
    step = layout.stored.itemsize
    for n, part in zip(reversed(layout.chunk[1:]), reversed(inside), strict=True):
        first += part.start * step
        last += (part.start + (part.stop - 1 - part.start) // part.step * part.step) * step
        step *= n
    return first, last + layout.stored.itemsize
