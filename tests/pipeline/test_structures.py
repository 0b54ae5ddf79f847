"""Batches have the structure of their source; items travel with their rows."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore

Make = Callable[..., Pipeline]


# ---- one table --------------------------------------------------------------------------------------------------


def test_one_store_gives_one_tensor(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(6)
    with pipeline(values, batch_sampler=[[4, 1]]) as pipe:
        batch = next(iter(pipe))
    assert torch.equal(batch.data, values[[4, 1]])
    assert len(batch) == 2
    assert torch.equal(batch[0], values[4])
    assert [row.tolist() for row in batch] == values[[4, 1]].tolist()


def test_a_tuple_gives_a_tuple_that_unpacks_indexes_and_measures(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    x, y = numbered(6), torch.arange(6)
    with pipeline((x, y), batch_sampler=[[4, 1]]) as pipe:
        batch = next(iter(pipe))
    first, second = batch
    assert isinstance(batch.data, tuple)
    assert torch.equal(first, x[[4, 1]])
    assert torch.equal(second, y[[4, 1]])
    assert torch.equal(batch[1], second)
    assert len(batch) == 2


def test_a_dict_gives_a_dict_with_the_same_keys_in_the_same_order(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    source: dict[Any, Tensor] = {"x": numbered(6), 7: torch.arange(6)}
    with pipeline(source, batch_sampler=[[4, 1]]) as pipe:
        batch = next(iter(pipe))
    assert list(batch.data) == list(batch) == ["x", 7]
    assert torch.equal(batch["x"], source["x"][[4, 1]])
    assert torch.equal(batch[7], source[7][[4, 1]])
    assert len(batch) == 2


def test_columns_of_different_length_are_refused_with_their_lengths(ahead: Make) -> None:
    with pytest.raises(ValueError, match=r"equal length.*4.*5"):
        ahead({"x": torch.zeros(4), "y": torch.zeros(5)}, batch_size=2)


@pytest.mark.parametrize("source", [{}, ()])
def test_a_source_without_a_store_is_refused(ahead: Make, source: Any) -> None:
    with pytest.raises(ValueError, match="store"):
        ahead(source, batch_size=2)


def test_a_source_that_is_no_store_is_refused(ahead: Make) -> None:
    with pytest.raises(TypeError, match="store"):
        ahead(object(), batch_size=2)


def test_what_a_batch_is_shows_in_its_repr(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline((numbered(6), torch.arange(6)), batch_sampler=[[4, 1]]) as pipe:
        assert repr(next(iter(pipe))) == "<Batch 0: (2, 3) float32 on cpu, (2,) int64 on cpu>"


# ---- several tables ---------------------------------------------------------------------------------------------


def test_several_tables_of_different_length_are_dicts_by_table(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    users, films, years = numbered(5), numbered(9, 2), torch.arange(9)
    items: list[dict[str, Any]] = [
        {"u": [4, 0], "f": [[8, 1], [1, 1]]},
        {"u": [], "f": [[0]]},
        {"u": [3], "f": np.empty((0, 2), int)},
    ]
    index = {"user": "u", "film": lambda item: item["f"]}
    with pipeline({"user": users, "film": (films, years)}, batch_sampler=items, index=index) as pipe:
        for item, batch in zip(items, pipe, strict=True):
            u, f = torch.tensor(item["u"], dtype=torch.int64), torch.as_tensor(item["f"], dtype=torch.int64)
            assert list(batch.data) == ["user", "film"]
            assert torch.equal(batch.data["user"], users[u])
            assert torch.equal(batch.data["film"][0], films[f])
            assert torch.equal(batch.data["film"][1], years[f])
            assert torch.equal(batch.index["user"], u)
            assert torch.equal(batch.index["film"], f)


def test_two_tables_over_the_same_store_are_read_by_their_own_index(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    store = ArrayStore(numbered(8))
    with pipeline({"head": store, "tail": store}, batch_sampler=[([1, 2], [2, 7])], index={"head": 0, "tail": 1}) as pipe:
        batch = next(iter(pipe))
    assert batch["head"][:, 0].tolist() == [100, 200]
    assert batch["tail"][:, 0].tolist() == [200, 700]


def test_tables_and_index_must_name_the_same(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="'film', 'user'"):
        ahead({"user": numbered(3)}, batch_sampler=[], index={"user": 0, "film": 1})
    with pytest.raises(ValueError, match="tables"):
        ahead(numbered(3), batch_sampler=[], index={"user": 0})


def test_several_tables_need_a_sampler_of_items(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="batch_sampler"):
        ahead({"user": numbered(3)}, batch_size=2, index={"user": 0})


def test_a_dtype_names_a_column_of_a_table(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    source = {"a": {"x": numbered(3)}, "b": numbered(3)}
    dtype = {"a.x": torch.float16, "b": torch.float64}
    with pipeline(source, batch_sampler=[([0], [1])], index={"a": 0, "b": 1}, dtype=dtype) as pipe:
        batch = next(iter(pipe))
    assert batch["a"]["x"].dtype == torch.float16
    assert batch["b"].dtype == torch.float64


# ---- items ------------------------------------------------------------------------------------------------------


@dataclass
class Graph:
    nodes: Tensor
    edges: tuple[Tensor, Tensor]
    name: str


Pair = namedtuple("Pair", ["rows", "label"])


def test_the_item_comes_with_its_rows_whatever_holds_it(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    label = torch.tensor([1.5, 2.5])
    items: list[tuple[Any, Any]] = [
        ({"rows": [1, 2], "label": label}, "rows"),
        (Pair(np.array([1, 2]), label), 0),
        ([torch.tensor([1, 2]), [label, "text"]], 0),
        (OrderedDict(rows=range(1, 3), more={"deep": (label, None)}), "rows"),
        (Graph(torch.tensor([1, 2]), (label, label), "g"), lambda graph: graph.nodes),
    ]
    for item, index in items:
        with pipeline(numbered(4), batch_sampler=[item, item], index=index) as pipe:
            for batch in pipe:
                assert batch.data[:, 0].tolist() == [100, 200]
                assert type(batch.item) is type(item)
    assert batch.item.name == "g"
    assert torch.equal(batch.item.edges[1], label)


def test_a_tensor_of_an_item_that_the_sampler_uses_again_is_served_as_it_was_when_yielded(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    class Reusing:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            item: dict[str, Any] = {"rows": [0], "label": torch.zeros(1), "deep": [torch.zeros(1)]}
            for number in range(8):
                item["rows"][0] = number
                item["label"].fill_(number)
                item["deep"][0].fill_(number)
                yield item

    with pipeline(numbered(8), batch_sampler=Reusing(), index="rows") as pipe:
        for number, batch in enumerate(pipe):
            assert batch.index.tolist() == [number]
            assert (batch.item["label"].item(), batch.item["deep"][0].item()) == (number, number)


def test_without_index_the_item_is_what_the_sampler_yielded(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(4), batch_sampler=[[1, 2], torch.tensor([3])]) as pipe:
        first, second = pipe
    assert list(first.item) == [1, 2]
    assert second.item.tolist() == [3]


def test_with_a_batch_size_there_is_no_item(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(4), batch_size=2) as pipe:
        assert [batch.item for batch in pipe] == [None, None]


def test_an_item_that_lacks_the_key_is_an_error_that_names_the_batch(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    with windowed(numbered(4), batch_sampler=[{"rows": [1]}, {"row": [1]}], index="rows") as pipe:
        batches = iter(pipe)
        next(batches)
        with pytest.raises(LookupError, match=r"batch 1"):
            next(batches)


def test_what_an_index_callable_raises_rises_with_the_batch_in_a_note(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    def broken(item: Any) -> Any:
        raise ZeroDivisionError("of the user's")

    with windowed(numbered(4), batch_sampler=[{"rows": [1]}], index=broken) as pipe:
        with pytest.raises(ZeroDivisionError, match="of the user's") as caught:
            next(iter(pipe))
        assert "batch 0" in " ".join(caught.value.__notes__)
