"""A RowTable in a training loop: what a batch is, what reaches the stores, and looking without training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, optim
from torch.nn.functional import embedding

from rowferry.pipeline import RowTable
from rowferry.pipeline._candidates import go_on
from rowferry.stores import create_store, open_store

MakeTable = Callable[..., RowTable]

# ---- a batch ----------------------------------------------------------------------------------------------------


def test_a_batch_has_a_fresh_leaf_with_its_distinct_rows(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    seen = []
    for batch in trained.batches([[[7, 2, 7]], [3]], **moving):
        assert batch.weight.is_leaf
        assert batch.weight.requires_grad
        assert batch.weight.grad is None
        assert torch.equal(batch.rows[batch.inverse], batch.index)
        assert torch.equal(batch.lookup(), trained.lookup(batch.index))
        seen.append(batch.weight)
    assert [weight[:, 0].tolist() for weight in seen] == [[200, 700], [300]]


def test_gradients_of_a_rows_uses_add_up_and_the_row_is_trained_once(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    for batch in trained.batches([[5, 5], [5]], **moving):
        batch.lookup().sum().backward()
        batch.step()
    assert trained.lookup([5, 6]).tolist() == [[500 - 1.5, 501 - 1.5, 502 - 1.5], [600, 601, 602]]


def test_each_batch_sees_what_the_ones_before_it_wrote(table: MakeTable, moving: dict[str, Any]) -> None:
    trained, found = table(), []
    for batch in trained.batches([[1, 2], [2, 3], [2]], **moving):
        found.append(batch.lookup()[:, 0].tolist())
        batch.lookup().sum().backward()
        batch.step()
    assert found == [[100, 200], [199.5, 300], [199]]


def test_each_call_of_batches_goes_on_with_what_the_ones_before_it_learnt(
    table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, met = table(), []

    def noted(movers: Any, learnt: Any) -> Any:
        met.append((learnt, made := go_on(movers, learnt)))
        return made

    monkeypatch.setattr("rowferry.pipeline._table_epoch.go_on", noted)
    for train in (True, False, True, False):
        for batch in trained.batches([[1, 2]], mover="copy", train=train):
            assert len(batch.index) == 2
    assert [known is None for known, _ in met] == [True, True, False, False]
    assert met[2][0] is met[0][1]
    assert met[3][0] is met[1][1]


def test_a_batch_that_is_not_stepped_changes_nothing_and_moves_no_counter(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table(optim.Adam, {"lr": 0.1})
    for number, batch in enumerate(trained.batches([[1], [1], [1]], **moving)):
        batch.lookup().sum().backward()
        if number == 1:
            trained.optimizer.step()  # and no write_back
        else:
            batch.step()
    assert trained.scalars == {"step": 2.0}
    assert trained.lookup([1])[0, 0].item() == pytest.approx(99.8, abs=1e-4)


def test_without_a_gradient_the_optimizer_is_not_called(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table(optim.Adam, {"lr": 0.1, "weight_decay": 0.5})
    for batch in trained.batches([[1], [2]], **moving):
        batch.step()
    assert trained.scalars == {}
    assert trained.lookup([1, 2]).tolist() == [[100, 101, 102], [200, 201, 202]]


@pytest.mark.parametrize("kind", [optim.Adam, optim.SparseAdam])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_an_empty_batch_advances_nothing(table: MakeTable, kind: Any, moving: dict[str, Any]) -> None:
    trained = table(kind, {"lr": 0.1})
    for batch in trained.batches([[1], [], [2]], **moving):
        assert batch.weight.shape == (batch.index.numel(), 3)
        batch.lookup().sum().backward()
        batch.step()
    assert trained.scalars == {"step": 2.0}


def test_steps_that_come_too_late_or_twice_are_refused(table: MakeTable, moving: dict[str, Any]) -> None:
    batches = iter(table().batches([[1], [2], [3]], **moving))
    first = next(batches)
    second = next(batches)
    with pytest.raises(RuntimeError, match="batch 0 cannot be stepped any more: a later batch was taken"):
        first.step()
    with pytest.raises(RuntimeError, match="batch 0 cannot be written back any more"):
        first.write_back()
    second.lookup().sum().backward()
    second.step()
    with pytest.raises(RuntimeError, match="batch 1 cannot be stepped: it was written back before"):
        second.step()


def test_gradient_accumulation_is_one_batch_over_the_union_of_ids(table: MakeTable, moving: dict[str, Any]) -> None:
    micro, trained = [[1, 2], [2, 3]], table()
    for batch in trained.batches([micro], **moving):
        for part in batch.inverse:
            embedding(part, batch.weight).sum().backward()
        batch.step()
    assert trained.lookup([1, 2, 3])[:, 0].tolist() == [99.5, 199, 299.5]


def test_items_bring_their_ids_and_keep_what_else_they_have(table: MakeTable, moving: dict[str, Any]) -> None:
    items = [{"ids": [1, 2], "label": torch.tensor([0.0, 1.0]), "name": "a"}]
    for batch in table().batches(items, index="ids", **moving):
        assert batch.item["name"] == "a"
        assert batch.item["label"].tolist() == [0, 1]
        assert batch.rows.tolist() == [1, 2]


def test_built_in_orders_work_and_epochs_repeat(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    batches = trained.batches(batch_size=8, shuffle=True, seed=3, **moving)
    assert len(batches) == 3
    for _ in range(2):
        for batch in batches:
            batch.lookup().sum().backward()
            batch.step()
    assert trained.lookup(range(20))[:, 0].tolist() == [100 * row - 1 for row in range(20)]
    assert batches.stats().rows == 40


def test_a_bad_id_is_refused_and_names_its_batch(table: MakeTable, moving: dict[str, Any]) -> None:
    for ids, said in (([1, 20], "row 20"), ([-1], "row -1")):
        batches = iter(table().batches([[0], ids], **moving))
        next(batches)
        with pytest.raises(IndexError, match=f"{said} is out of range for batch 1"):
            next(batches)
    with pytest.raises(IndexError, match="row -1"):
        table().lookup([-1])


def test_a_loop_that_breaks_keeps_what_was_written(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    for batch in trained.batches([[1], [1], [1]], **moving):
        batch.lookup().sum().backward()
        batch.step()
        if batch.number == 1:
            break
    assert trained.lookup([1])[0, 0].item() == 99
    for batch in trained.batches([[1]], **moving):  # the next loop ends the one before
        assert batch.lookup()[0, 0].item() == 99


def test_rows_of_any_rank_are_trained(moving: dict[str, Any]) -> None:
    for shape in ((6,), (6, 2, 3)):
        weights = torch.ones(shape)
        trained = RowTable(weights, optim.Adam, {"lr": 0.1}, device="cpu")
        for batch in trained.batches([[[4, 4], [0, 1]]], **moving):
            assert batch.lookup().shape == (2, 2, *shape[1:])
            batch.lookup().sum().backward()
            batch.step()
        trained.flush()
        assert [bool(row.lt(1).all()) for row in weights] == [True, True, False, False, True, False]


# ---- looking, not training --------------------------------------------------------------------------------------


def test_evaluation_inside_training_sees_all_that_was_written(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    for batch in trained.batches([[1], [1], [2]], **moving):
        batch.lookup().sum().backward()
        batch.step()
        for seen in trained.batches([[[1, 2, 1]]], train=False, **moving):
            assert torch.equal(seen.lookup(), trained.lookup([[1, 2, 1]]))
            assert torch.equal(embedding(seen.inverse, seen.weight), seen.lookup())
            assert seen.rows.tolist() == [1, 2]
            assert not seen.weight.requires_grad
            with pytest.raises(RuntimeError, match="train=False"):
                seen.step()
    assert trained.lookup([1, 2])[:, 0].tolist() == [99, 199.5]


def test_a_table_that_is_only_looked_at_may_be_read_only_and_has_no_state(tmp_path: Any) -> None:
    with create_store(tmp_path / "w.npy", (4, 2), torch.float32, fill=3):
        pass
    with open_store(tmp_path / "w.npy") as store:
        looked = RowTable(store, optim.Adam, device="cpu")
        assert [batch.lookup().tolist() for batch in looked.batches([[1]], train=False)] == [[[3, 3]]]
        assert looked.state == {}
        with pytest.raises(PermissionError, match="read-only"):
            looked.batches([[1]])


def test_a_batch_of_a_later_loop_stays_bound_when_an_earlier_one_ends(table: MakeTable) -> None:
    trained = table()
    with trained.batches([[1], [1]]) as first:
        early = iter(first)
        next(early)
        for batch in trained.batches([[2]]):
            assert next(early, None) is None
            first.close()
            batch.lookup().sum().backward()
            batch.step()
    assert trained.lookup([1, 2])[:, 0].tolist() == [100, 199.5]


@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=12),
    skipped=st.sets(st.integers(0, 11)),
    lookahead=st.integers(0, 6),
    depth=st.integers(1, 4),
)
def test_any_schedule_stores_the_same_bits(ids: list[list[int]], skipped: set[int], lookahead: int, depth: int) -> None:
    def trained(**moving: Any) -> list[Tensor]:
        weights = torch.linspace(-1, 1, 30).view(10, 3)
        one = RowTable(weights, optim.Adam, {"lr": 0.1}, device="cpu")
        for batch in one.batches(ids, staging_bytes=1 << 18, **moving):
            ((batch.lookup() - 0.3) ** 2).sum().backward()
            if batch.number not in skipped:
                batch.step()
        one.flush()
        return [weights, *(store.gather(range(10)) for store in one.state.values())]

    for found, wanted in zip(trained(mover="copy", lookahead=lookahead, depth=depth), trained(mover="local"), strict=True):
        assert torch.equal(found, wanted)
