"""A table's own numbers in a commit of its stores, and back: what ``RowTable(resume=True)`` goes on from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rowferry.stores import Store
from rowferry.stores._commit_state import decode_state

if TYPE_CHECKING:
    from ._table_core import Core

_KEY = "tables"


def committed_tables(cores: Iterable[Core]) -> dict[str, Any]:
    """What belongs to a commit beside the place in the order of batches: counters of each table in an atomic store."""
    return {
        _KEY: {
            core.weights.durable.label: {"scalars": core.numbers(), "served": core.served}
            for core in cores
            if core.weights.durable is not None
        }
    }


def committed_table(weights: Store, state: Any) -> tuple[dict[str, float] | None, int]:
    """A table's counters and the batches it had been trained on, at the last commit of its stores.

    Raises:
        TypeError: ``state`` is no dict of stores. ValueError: the stores were not committed together, by a table.
    """
    if not isinstance(state, Mapping) or not all(isinstance(store, Store) for store in state.values()):
        raise TypeError(
            "resume=True goes on with stores that exist: pass state= a dict of them by column, {} if there are none"
        )
    files = [store.durable for store in (weights, *state.values())]
    found = None if files[0] is None else decode_state(files[0].state)
    label = "" if files[0] is None else files[0].label
    if not isinstance(found, dict) or label not in found.get(_KEY, {}):
        raise ValueError(
            f"{weights.name} was not committed by a table; resume=True needs stores that are opened with durability='atomic', "
            "and a flush() of the table since they were made"
        )
    for name, file in zip(state, files[1:], strict=True):
        if file is None or decode_state(file.state) != found:
            raise ValueError(f"state[{name!r}], {state[name].name}, was not committed together with {weights.name}")
    table = found[_KEY][label]
    return table["scalars"], table["served"]
