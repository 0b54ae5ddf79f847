"""Ids that stand for nothing, and sizes rounded up for compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn.functional import embedding

from rowferry.pipeline import RowTable

MakeTable = Callable[..., RowTable]

# ---- padding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [-1, 0, 4])
def test_padding_ids_are_zero_rows_without_gradient_or_transfer(table: MakeTable, padding: int, moving: dict[str, Any]) -> None:
    trained = table(optim.SGD, {"lr": 0.5, "weight_decay": 0.1}, padding=padding)
    before = trained.lookup(range(20)).clone()
    batches = trained.batches([[[3, padding], [padding, 3]], [[5, 6]]], **moving)
    stepped = iter(batches)
    batch = next(stepped)
    assert batch.index.tolist() == [[3, padding], [padding, 3]]
    assert torch.equal(batch.rows[batch.inverse], batch.index)
    assert batch.rows.tolist() == [3, padding]
    assert batch.weight.shape == (2, 3)
    assert batch.lookup()[0, 1].tolist() == [0, 0, 0]
    ((batch.lookup() - 1) ** 2).sum().backward()
    assert batch.weight.grad is not None
    assert batch.weight.grad[1].tolist() == [0, 0, 0]
    batch.step()
    assert next(stepped).rows.tolist() == [5, 6]
    assert batches.stats().rows == 4
    after = trained.lookup(range(20))
    assert (before != after).any(1).nonzero().view(-1).tolist() == [3]
    assert trained.lookup([[3, padding]])[0, 1].tolist() == [0, 0, 0]


def test_a_batch_of_padding_alone_changes_nothing(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table(optim.Adam, {"lr": 0.1}, padding=-1)
    for batch in trained.batches([[-1, -1], [1]], **moving):
        batch.lookup().sum().backward()
        batch.step()
    assert trained.scalars == {"step": 1.0}


def test_evaluation_with_padding_gives_zero_rows_too(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table(padding=-1)
    (batch,) = list(trained.batches([torch.tensor([[4, -1], [-1, 4]])], train=False, **moving))
    assert batch.lookup()[:, :, 0].tolist() == [[400, 0], [0, 400]]
    assert torch.equal(embedding(batch.inverse, batch.weight), batch.lookup())


def test_a_sampler_with_padding_keeps_its_length_state_and_epochs(table: MakeTable) -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[1, -1]])

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = Sampler()
    batches = table(padding=-1).batches(sampler)
    assert len(batches) == 1
    assert [batch.rows.tolist() for _ in range(2) for batch in batches] == [[1, -1], [1, -1]]
    assert sampler.epochs == [0, 1]
    once = table(padding=-1).batches(iter([[1, -1]]))
    assert len(list(once)) == 1
    with pytest.raises(RuntimeError, match="drawn from once"):
        iter(once)


def test_every_kind_of_index_works_beside_padding(table: MakeTable) -> None:
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[0, 3]] = True
    kinds: list[Any] = [slice(2, 5), slice(-2, None), range(3), mask, [], 4, torch.tensor(0), torch.tensor([[0, 3]]).int()]
    trained = table(padding=0)
    found = [(batch.index.tolist(), batch.lookup()) for batch in trained.batches(kinds)]
    assert [ids for ids, _ in found] == [[2, 3, 4], [18, 19], [0, 1, 2], [0, 3], [], 4, 0, [[0, 3]]]
    for kind, (_, vectors) in zip(kinds, found, strict=True):
        assert torch.equal(vectors, trained.lookup(kind))
    assert found[6][1].tolist() == [0, 0, 0]


def test_padding_that_cannot_be_is_refused(table: MakeTable) -> None:
    for padding in (-2, 20):
        with pytest.raises(ValueError, match="padding"):
            table(padding=padding)
    with pytest.raises(IndexError, match="row -2"):
        list(table(padding=-1).batches([[-1, -2]]))
    with pytest.raises(ValueError, match="index batches"):
        table(padding=-1).batches(batch_size=2)


# ---- padded sizes and compilation -------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, -1])
def test_pad_rows_rounds_up_weight_and_state_and_stores_none_of_it(
    table: MakeTable, padding: int | None, moving: dict[str, Any]
) -> None:
    plain, padded = table(optim.Adam, {"lr": 0.1}), table(optim.Adam, {"lr": 0.1}, padding=padding)
    ids = [[1, 2, 3], [3, 9, 9, 9, 9, 9], list(range(11))]
    for batch in plain.batches(ids, **moving):
        (batch.lookup() ** 2).sum().backward()
        batch.step()
    for batch in padded.batches(ids, pad_rows=4, **moving):
        assert batch.weight.shape[0] % 4 == 0
        assert batch.weight.shape[0] - len(batch.rows) < 4
        (batch.lookup() ** 2).sum().backward()
        assert not batch.weight[len(batch.rows) :].any()
        padded.optimizer.step()
        assert {tuple(value.shape) for value in padded.optimizer.state[batch.weight].values()} == {(), batch.weight.shape}
        batch.write_back()
    assert torch.equal(plain.lookup(range(20)), padded.lookup(range(20)))
    for column, store in plain.state.items():
        assert torch.equal(store.gather(range(20)), padded.state[column].gather(range(20)))


@pytest.mark.parametrize(("dynamic", "most"), [(False, 3), (None, 2)])
def test_a_compiled_step_is_compiled_at_most_once_a_padded_size(table: MakeTable, dynamic: bool | None, most: int) -> None:
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    def forward(weight: Tensor, inverse: Tensor) -> Tensor:
        return (embedding(inverse, weight) ** 2).sum()

    torch.compiler.reset()
    step = torch.compile(forward, backend=backend, dynamic=dynamic)
    generator = torch.Generator().manual_seed(0)
    trained = table()
    sizes = set()
    for batch in trained.batches([torch.randint(0, 20, (12,), generator=generator) for _ in range(20)], pad_rows=4):
        sizes.add(len(batch.weight))
        step(batch.weight, batch.inverse).backward()
        batch.step()
    assert len(sizes) > 1
    assert compiled <= min(most, len(sizes))
    torch.compiler.reset()


def test_pad_rows_that_is_no_positive_integer_is_refused(table: MakeTable) -> None:
    bad: list[Any] = [0, -1, 1.5, True]
    for pad_rows in bad:
        with pytest.raises(ValueError, match="pad_rows"):
            table().batches([[1]], pad_rows=pad_rows)
