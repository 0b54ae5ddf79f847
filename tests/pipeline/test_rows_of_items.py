"""Finding the rows that an item asks for: the item itself, an entry of it, or what a callable makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rowferry.pipeline._sampling import Positions, rows_of


def test_the_rows_are_the_item_or_an_entry_of_it_or_what_a_callable_finds() -> None:
    item = {"nodes": [1, 2], "pairs": (3, 4)}
    assert rows_of([7, 8], None, 0) == [7, 8]
    assert rows_of(item, "nodes", 0) == [1, 2]
    assert rows_of((5, [6]), 1, 0) == [6]
    assert rows_of(item, lambda it: it["pairs"][0], 0) == 3
    assert rows_of(item, {"u": "nodes", "v": lambda it: it["pairs"]}, 0) == {"u": [1, 2], "v": (3, 4)}


def test_built_in_positions_count_as_the_rows_at_them() -> None:
    assert rows_of(Positions(2, 4, None), None, 0).tolist() == [2, 3]
    edges = np.array([[0, 9], [1, 8], [2, 7]])
    found = rows_of(Positions(1, 3, None), {"u": lambda rows: edges[rows, 0], "v": lambda rows: edges[rows, 1]}, 0)
    assert {table: index.tolist() for table, index in found.items()} == {"u": [1, 2], "v": [8, 7]}


@pytest.mark.parametrize(
    ("item", "index", "kind", "message"),
    [
        ({"a": 1}, "b", LookupError, r"index='b' .* batch 41, a dict"),
        ((1, 2), 2, LookupError, r"index=2 .* batch 41, a tuple"),
        ((1, 2), "b", TypeError, r"index='b' .* batch 41, a tuple"),
        (5, "b", TypeError, r"batch 41, a int"),
        ({"a": 1}, {"u": "a", "v": "c"}, LookupError, r"index\['v'\]='c' .* batch 41, a dict"),
    ],
)
def test_an_item_without_the_key_is_an_error_that_names_its_type_and_batch(
    item: Any, index: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        rows_of(item, index, 41)


def test_what_an_index_callable_raises_keeps_its_type_and_gets_a_note() -> None:
    def broken(item: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        rows_of([1], {"u": broken}, 12)
    assert caught.value.__notes__ == ["raised by index['u']= on the item of batch 12, a list"]
