"""How far the user is, for ``state_dict``: epoch and batches given out, not those prefetched."""

from __future__ import annotations

from typing import Any, final

VERSION = 1


@final
class Progress:
    """Place in the order of batches, and whether stores are behind it. Used by the user's thread alone.

    Attributes:
        epoch: the running epoch, or the next one when none has begun.
        batch: batches given out of it; after ``load`` those to skip.
    """

    def __init__(self, seed: int) -> None:
        self.epoch = 0
        self.batch = 0
        self._seed = seed
        self._skip = 0  # batches that the next epoch leaves out at its start
        self._sampler: Any = None
        self._begun = False
        self._dirty = False  # rows were written back since the last flush

    def next_epoch(self) -> tuple[int, int, Any]:
        """The next epoch's number, batches to skip and the sampler's saved state.

        One left by a break has ended. One that gave out nothing begins again, so that a trainer's ``iter()`` that only asks
        whether a loader can be iterated over neither skips an epoch nor loses what ``load`` said.
        """
        if self._begun:
            self.end()
        return self.epoch, self._skip, self._sampler

    def begin(self) -> None:
        """The epoch of ``next_epoch`` has begun."""
        self.batch = self._skip
        self._sampler = self._sampler if self._skip else None

    def served(self, number: int, sampler: Any) -> None:
        """Batch ``number`` was given out; ``sampler`` is a foreign sampler's state after it, if it has one."""
        self.batch, self._sampler = number + 1, sampler
        self._skip, self._begun = 0, True

    def end(self) -> None:
        """The epoch is over."""
        self.move_to(self.epoch + 1)

    def move_to(self, epoch: int) -> None:
        """The next epoch is ``epoch``, from its first batch."""
        self.epoch, self.batch, self._skip, self._sampler, self._begun = epoch, 0, 0, None, False

    def wrote(self) -> None:
        """Rows were written back."""
        self._dirty = True

    def flushed(self) -> None:
        """All that was written is in the stores."""
        self._dirty = False

    def save(self) -> dict[str, Any]:
        """See ``Pipeline.state_dict``."""
        if self._dirty:
            raise RuntimeError(
                "rows were written back after the last flush(); call flush() first, so that state and stores agree"
            )
        return self.position()

    def position(self) -> dict[str, Any]:
        """The same, for who knows that all that was written is in the stores."""
        return {
            "version": VERSION,
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self.batch,
            "sampler": self._sampler,
        }

    def require_loadable(self, state: dict[str, Any]) -> None:
        """Refuse a state of another version or seed."""
        if state.get("version") != VERSION:
            raise ValueError(f"state of version {state.get('version')!r}; this rowferry reads version {VERSION}")
        if state["seed"] != self._seed:
            raise ValueError(
                f"the state was saved under seed={state['seed']}, this pipeline has seed={self._seed}; pass the saved one"
            )

    def load(self, state: dict[str, Any]) -> None:
        """The next epoch continues at ``state``, which was found loadable."""
        self.move_to(state["epoch"])
        self.batch = self._skip = state["position"]
        self._sampler = state["sampler"]
