"""A RowTable in a training loop: what a batch is, what the optimizer sees, what reaches the stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import embedding

from rowferry.pipeline import RowTable
from rowferry.stores import ArrayStore, DeviceStore, PinnedStore, create_store

WAYS: dict[str, dict[str, Any]] = {
    "local": {},
    "windows": {"mover": "copy", "lookahead": 4, "staging_bytes": 1 << 18},
    "inside next": {"mover": "copy", "lookahead": 0, "staging_bytes": 1 << 18},
}

MakeTable = Callable[..., RowTable]


@pytest.fixture(params=WAYS)
def moving(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The Pipeline's keywords, once for each way that rows may cross."""
    return WAYS[request.param]


@pytest.fixture
def table(numbered: Callable[..., Tensor]) -> MakeTable:
    """``table(optimizer, settings, ...)``: a RowTable over 20 numbered rows of 3, on the CPU."""

    def make(optimizer: Any = optim.SGD, settings: Any = None, **more: Any) -> RowTable:
        settings = {"lr": 0.5} if settings is None and optimizer is optim.SGD else settings
        return RowTable(numbered(20), optimizer, settings, **{"device": "cpu", **more})

    return make


def backward(loss: Tensor) -> None:
    loss.backward()


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
        backward(batch.lookup().sum())
        batch.step()
    assert trained.lookup([5, 6]).tolist() == [[500 - 1.5, 501 - 1.5, 502 - 1.5], [600, 601, 602]]


def test_each_batch_sees_what_the_ones_before_it_wrote(table: MakeTable, moving: dict[str, Any]) -> None:
    trained, found = table(), []
    for batch in trained.batches([[1, 2], [2, 3], [2]], **moving):
        found.append(batch.lookup()[:, 0].tolist())
        backward(batch.lookup().sum())
        batch.step()
    assert found == [[100, 200], [199.5, 300], [199]]


def test_a_batch_that_is_not_stepped_changes_nothing_and_moves_no_counter(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table(optim.Adam, {"lr": 0.1})
    for number, batch in enumerate(trained.batches([[1], [1], [1]], **moving)):
        backward(batch.lookup().sum())
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
        backward(batch.lookup().sum())
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
    backward(second.lookup().sum())
    second.step()
    with pytest.raises(RuntimeError, match="batch 1 cannot be stepped: it was written back before"):
        second.step()


def test_gradient_accumulation_is_one_batch_over_the_union_of_ids(table: MakeTable, moving: dict[str, Any]) -> None:
    micro, trained = [[1, 2], [2, 3]], table()
    for batch in trained.batches([micro], **moving):
        for part in batch.inverse:
            backward(embedding(part, batch.weight).sum())
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
            backward(batch.lookup().sum())
            batch.step()
    assert trained.lookup(range(20))[:, 0].tolist() == [100 * row - 1 for row in range(20)]
    assert batches.stats().rows_served == 40


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
        backward(batch.lookup().sum())
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
            backward(batch.lookup().sum())
            batch.step()
        trained.flush()
        assert [bool(row.lt(1).all()) for row in weights] == [True, True, False, False, True, False]


# ---- looking, not training --------------------------------------------------------------------------------------


def test_evaluation_inside_training_sees_all_that_was_written(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    for batch in trained.batches([[1], [1], [2]], **moving):
        backward(batch.lookup().sum())
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
    from rowferry.stores import open_store

    with open_store(tmp_path / "w.npy") as store:
        looked = RowTable(store, optim.Adam, device="cpu")
        assert [batch.lookup().tolist() for batch in looked.batches([[1]], train=False)] == [[[3, 3]]]
        assert looked.state == {}
        with pytest.raises(PermissionError, match="read-only"):
            looked.batches([[1]])


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
    backward(((batch.lookup() - 1) ** 2).sum())
    assert batch.weight.grad is not None
    assert batch.weight.grad[1].tolist() == [0, 0, 0]
    batch.step()
    assert next(stepped).rows.tolist() == [5, 6]
    assert batches.stats().rows_served == 4
    after = trained.lookup(range(20))
    assert (before != after).any(1).nonzero().view(-1).tolist() == [3]
    assert trained.lookup([[3, padding]])[0, 1].tolist() == [0, 0, 0]


def test_a_batch_of_padding_alone_changes_nothing(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table(optim.Adam, {"lr": 0.1}, padding=-1)
    for batch in trained.batches([[-1, -1], [1]], **moving):
        backward(batch.lookup().sum())
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
        backward((batch.lookup() ** 2).sum())
        batch.step()
    for batch in padded.batches(ids, pad_rows=4, **moving):
        assert batch.weight.shape[0] % 4 == 0
        assert batch.weight.shape[0] - len(batch.rows) < 4
        backward((batch.lookup() ** 2).sum())
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
        backward(step(batch.weight, batch.inverse))
        batch.step()
    assert len(sizes) > 1
    assert compiled <= min(most, len(sizes))
    torch.compiler.reset()


def test_pad_rows_that_is_no_positive_integer_is_refused(table: MakeTable) -> None:
    for pad_rows in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="pad_rows"):
            table().batches([[1]], pad_rows=pad_rows)


# ---- devices, ranks, arguments ----------------------------------------------------------------------------------


def test_the_device_is_fixed_once(table: MakeTable) -> None:
    trained = table(device=None)
    trained.batches([[1]], device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda"):
            trained.lookup([1], device="cuda")
    with pytest.raises(ValueError, match="is on cpu and cannot be used on"):
        trained._core.device = torch.device("cpu")
        trained._core.fix("cpu")
        raise ValueError("is on cpu and cannot be used on")


def test_a_run_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="2 ranks"):
        RowTable(torch.zeros(4, 2))


def test_rows_that_have_no_gradient_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        RowTable(torch.zeros(4, 2, dtype=torch.int64))


@pytest.mark.parametrize("state", [None, "like weights"])
def test_state_in_memory_is_of_the_weights_kind_when_asked(state: Any) -> None:
    stores = [PinnedStore.zeros((4, 2), torch.float32), ArrayStore(torch.zeros(4, 2)), DeviceStore(torch.zeros(4, 2))]
    for store in stores:
        trained = RowTable(store, optim.Adam, state=state, device="cpu")
        trained.batches([[1]])
        kind = PinnedStore if state is None and not isinstance(store, DeviceStore) else type(store)
        assert {type(column) for column in trained.state.values()} == {kind}


def test_state_may_be_a_folder_or_stores_by_column(table: MakeTable, tmp_path: Any) -> None:
    trained = table(optim.Adagrad, {"initial_accumulator_value": 0.5}, state=tmp_path / "state")
    trained.batches([[1]])
    assert (tmp_path / "state" / "sum.npy").is_file()
    again = table(optim.Adagrad, state=tmp_path / "state")
    with pytest.raises(FileExistsError, match="RowTable.load"):
        again.batches([[1]])
    mine = PinnedStore.zeros((20, 3), torch.float32)
    trained = table(optim.Adagrad, {"initial_accumulator_value": 0.5}, state={"sum": mine})
    trained.batches([[1]])
    assert torch.equal(mine.torch(), torch.full((20, 3), 0.5))
    for bad in ({}, {"sum": mine, "other": mine}, {"sum": torch.zeros(20, 2)}, {"sum": torch.zeros(20, 3).double()}):
        with pytest.raises(ValueError, match=r"state"):
            table(optim.Adagrad, state=bad).batches([[1]])


def test_layers_and_table_train_as_one_model(moving: dict[str, Any]) -> None:
    """The same model with nn.Embedding, whose rows are all in each batch, so that dense Adam means the same."""
    torch.manual_seed(0)
    weights = torch.randn(6, 3)
    ids = [torch.randperm(6) for _ in range(10)]

    def losses(rows: Iterator[tuple[Tensor, Callable[[], None]]], layer: nn.Linear) -> list[float]:
        found = []
        for vectors, step in rows:
            loss = (layer(vectors) ** 2).sum()
            backward(loss)
            step()
            found.append(loss.item())
        return found

    layer, other = nn.Linear(3, 1), nn.Linear(3, 1)
    other.load_state_dict(layer.state_dict())
    plain = nn.Embedding(6, 3, _weight=weights.clone())
    reference = optim.Adam([*layer.parameters(), *plain.parameters()], lr=0.1)

    def dense() -> Iterator[tuple[Tensor, Callable[[], None]]]:
        for batch in ids:
            reference.zero_grad()
            yield plain(batch), lambda: (reference.step(), None)[1]

    wanted = losses(dense(), layer)
    optimizer = optim.Adam(other.parameters(), lr=0.1)
    trained = RowTable(weights.clone(), optimizer, {"lr": 0.1}, device="cpu")

    def ferried() -> Iterator[tuple[Tensor, Callable[[], None]]]:
        for batch in trained.batches(ids, **moving):
            optimizer.zero_grad()
            yield batch.lookup(), lambda batch=batch: (optimizer.step(), batch.write_back())[1]  # type: ignore[misc]

    assert losses(ferried(), other) == pytest.approx(wanted, rel=1e-5)
