"""Where a store's rows lie, and which ways lead to them: what a pipeline goes by when it chooses how rows cross."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ._commit import Durable

if TYPE_CHECKING:  # the contract imports no backend
    from ._page_cache import PageCache


class Whereabouts:
    """Rows that are fetched through the host, unless a store says more.

    Attributes:
        device: where ``memory`` lives; the CPU for everything that is read through the host.
        memory: all rows as one C-contiguous tensor without a copy, or None when rows must be fetched (a file
            in another byte order, chunks, a URL). Writing to it writes the store.
        pinned: ``memory`` is page-locked, so a GPU kernel may read it (and write it, when writable) over the bus.
        owns_memory: the memory was made by the store, so that ``scatter`` may leave it to a kernel and return.
        page_cache: the file that ``memory`` maps read-only, where a GPU may read its pages once they are locked; else None.
        guarded: rows must be written by ``scatter`` all the same, never through ``memory``.
        durable: the file's part in commits, under ``durability="atomic"``.
    """

    device: torch.device = torch.device("cpu")
    memory: torch.Tensor | None = None
    pinned: bool = False
    owns_memory: bool = False
    page_cache: PageCache | None = None
    guarded: bool = False
    durable: Durable | None = None

    def resident(self) -> bool:
        """Whether rows can be read without waiting for a disk, as of now: what a pipeline on the CPU reads where it lies."""
        return True

    def any_order(self) -> bool:
        """Whether rows in any order are read about as fast as the same rows ascending, as of now."""
        return False

    def from_disk(self) -> bool:
        """Whether the rows read last came from a disk that a call keeps busy: then few threads read as fast as many."""
        return False

    def expect(self, rows: NDArray[np.int64]) -> None:
        """These rows (in range) will most likely be asked for soon: have a disk fetch them meanwhile. Any thread.

        A hint: it returns soon, raises nothing that reading the rows would not, and may do nothing.
        """
        del rows
