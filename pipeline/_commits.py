"""What ``Pipeline.flush`` does to the stores when all that was written has landed: one commit of those that are atomic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from rowferry.stores import Store
from rowferry.stores._commit import Group, join
from rowferry.stores._commit_state import encode_state

from ._progress import Progress


@final
class Commits:
    """The stores of one pipeline, as far as flushing goes.

    Atomic ones commit as one from here on, also after the pipeline: when one of them is flushed alone, all of them are
    committed, without a state.

    Attributes:
        more_state: gives what else belongs to the state that a commit saves, by key.
    """

    def __init__(self, stores: Sequence[Store], progress: Progress, *, writable: bool) -> None:
        self._stores = [store for store in stores if store.writable]
        self._progress = progress
        self._group: Group | None = None
        self._abandoned = False
        self.more_state: Callable[[], dict[str, Any]] | None = None
        files = [store.durable for store in self._stores if store.durable is not None]
        if writable and files:
            self._group = join(files)
            self._group.owned = True

    def land(self) -> None:
        """What stores hold back is where readers see it. No commit."""
        for store in self._stores:
            if store.durable is None:
                store.flush(False)

    def flush(self, sync: bool) -> None:
        """Flush each store; the atomic ones last, as one. Where there are such, the others are made durable first.

        Raises:
            OSError: a store failed; nothing is committed. TypeError: a sampler's state that a record cannot hold.
        """
        for store in self._stores:
            if store.durable is None or self._group is None:
                store.flush(sync or self._group is not None)
        if self._group is not None:
            state = self._progress.position() | (self.more_state() if self.more_state is not None else {})
            self._group.commit(encode_state(state))
        self._progress.flushed()

    def close(self) -> None:
        """The pipeline has ended orderly, and all that was written has landed: commit it."""
        if self._group is None or self._abandoned:
            return
        if self._group.dirty:
            self.flush(False)
        self._group.owned = False

    def abandon(self) -> None:
        """The loop ended by an error: what no ``flush`` covers is rolled back when the stores are opened again."""
        self._abandoned = True
