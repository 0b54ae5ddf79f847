"""Try every run of a model."""

from __future__ import annotations

from typing import NamedTuple

from ._model import Protocol
from ._model_state import Broken, State


class Found(NamedTuple):
    """``states`` that can be reached, and the first run that breaks the promise: its moves and what went wrong."""

    states: int
    wrong: str | None
    run: tuple[str, ...]


def search(protocol: Protocol, most: int = 1_000_000) -> Found:
    """Depth first over all states; stops at the first wrong run. A state without moves that is not closed is a deadlock.

    Raises:
        RuntimeError: more than ``most`` states; the case is too large to be tried whole.
    """
    start = protocol.start()
    came: dict[State, tuple[State, str] | None] = {start: None}
    todo = [start]
    while todo:
        state = todo.pop()
        moved = False
        try:
            for name, after in protocol.moves(state):
                moved = True
                if after not in came:
                    came[after] = (state, name)
                    todo.append(after)
        except Broken as broken:
            return Found(len(came), str(broken), _run(came, state))
        if not moved and state.phase != "closed":
            return Found(len(came), "deadlock", _run(came, state))
        if len(came) > most:
            raise RuntimeError(f"more than {most:,} states; try fewer windows, rows, flushes or failures")
    return Found(len(came), None, ())


def _run(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    while (step := came[state]) is not None:
        state, name = step
        names.append(name)
    return tuple(reversed(names))
