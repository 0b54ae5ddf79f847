"""RowTables: several tables from one stream of items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from rowferry.pipeline import RowTable, RowTables
from rowferry.stores import ArrayStore

MakeTable = Callable[..., RowTable]
ITEMS = [(torch.tensor([1, 2]), torch.tensor([[3, 3, 4]])), (torch.tensor([2]), torch.tensor([[4]]))]
INDEX = {"u": 0, "v": 1}


def test_each_batch_has_rows_of_all_tables_and_one_step_trains_them(table: MakeTable, moving: dict[str, Any]) -> None:
    u, v = table(), table(optim.Adam, {"lr": 0.1})
    both = RowTables({"u": u, "v": v})
    for batch in both.batches(ITEMS, index=INDEX, **moving):
        assert set(batch) == {"u", "v"}
        assert torch.equal(batch.item[1], batch["v"].index)
        found = batch.lookup()
        assert found["v"].shape == (*batch["v"].index.shape, 3)
        (found["u"].sum() + found["v"].sum()).backward()
        batch.step()
    both.flush()
    assert u.lookup([1, 2])[:, 0].tolist() == [99.5, 199]
    assert v.scalars == {"step": 2.0}
    assert v.lookup([4])[0, 0].item() == pytest.approx(399.8, abs=1e-3)


def test_an_optimizer_that_tables_share_is_stepped_once(table: MakeTable, moving: dict[str, Any]) -> None:
    u = table()
    v = table(u.optimizer, {"lr": 0.25})
    calls = []
    u.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for batch in RowTables({"u": u, "v": v}).batches(ITEMS, index=INDEX, **moving):
        (batch["u"].lookup().sum() + batch["v"].lookup().sum()).backward()
        batch.step()
    assert len(calls) == 2
    assert u.lookup([2])[0, 0].item() == 199
    assert v.lookup([3])[0, 0].item() == 299.5


def test_an_optimizer_that_none_of_the_tables_made_is_stepped_by_its_owner(table: MakeTable, moving: dict[str, Any]) -> None:
    layer = torch.nn.Linear(3, 1)
    optimizer = optim.SGD(layer.parameters(), lr=0.5)
    u, v = table(optimizer), table(optimizer)
    for batch in RowTables({"u": u, "v": v}).batches(ITEMS[:1], index=INDEX, **moving):
        (batch["u"].lookup().sum() + batch["v"].lookup().sum()).backward()
        with pytest.raises(RuntimeError, match="table 'u' trains in an optimizer that was made elsewhere"):
            batch.step()
        optimizer.step()
        batch.write_back()
        with pytest.raises(RuntimeError, match="written back before"):
            batch.write_back()
    assert u.lookup([1])[0, 0].item() == 99.5


def test_each_table_has_its_own_padding_and_evaluation_works(table: MakeTable, moving: dict[str, Any]) -> None:
    u, v = table(padding=-1), table()
    items = [{"a": [1, -1], "b": [0]}, {"a": [-1], "b": [1]}]
    tables = RowTables({"u": u, "v": v})
    for batch in tables.batches(items, index={"u": "a", "v": lambda item: item["b"]}, pad_rows=4, **moving):
        assert batch["u"].weight.shape == batch["v"].weight.shape == (4, 3)
        (batch["u"].lookup().sum() + batch["v"].lookup().sum()).backward()
        batch.step()
    seen = [batch.lookup() for batch in tables.batches(items, index={"u": "a", "v": "b"}, train=False, **moving)]
    assert [found["u"][:, 0].tolist() for found in seen] == [[99.5, 0], [0]]
    assert [found["v"][:, 0].tolist() for found in seen] == [[-0.5], [99.5]]


def test_tables_that_do_not_fit_together_are_refused(table: MakeTable) -> None:
    u = table()
    with pytest.raises(ValueError, match="index must be a dict"):
        RowTables({"u": u}).batches(ITEMS, index={"w": 0})
    with pytest.raises(ValueError, match="at least one"):
        RowTables({})
    with pytest.raises(TypeError, match="RowTables takes RowTables"):
        RowTables({"u": torch.zeros(3)})  # type: ignore[dict-item]
    shared = ArrayStore(torch.zeros(20, 3))
    with pytest.raises(ValueError, match="twice"):
        RowTables({"u": RowTable(shared, device="cpu"), "v": RowTable(shared, device="cpu")}).batches(ITEMS, index=INDEX)
