"""Saving a table and loading it: one moment, whole or not at all, nothing executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from rowferry.pipeline import RowTable
from rowferry.stores import ArrayStore, PinnedStore, open_store

MakeTable = Callable[..., RowTable]
IDS = [[1, 2], [2, 3, 4], [4], [1, 4]]


def train(table: RowTable, ids: list[list[int]] = IDS, **moving: Any) -> None:
    for batch in table.batches(ids, **moving):
        (batch.lookup() ** 2).sum().backward()
        batch.step()
    table.flush()


def everything(table: RowTable) -> dict[str, Tensor]:
    return {"weight": table.lookup(range(20)), **{name: store.gather(range(20)) for name, store in table.state.items()}}


@pytest.mark.parametrize("kind", ["npy", "zarr"])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (optim.Adam, {"lr": 0.1, "amsgrad": True, "betas": (0.8, 0.9)}),
        (optim.NAdam, {"lr": 0.1}),
        (optim.SparseAdam, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
        (optim.SGD, {"lr": 0.01}),
        (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_loaded_table_goes_on_as_if_nothing_had_happened(
    table: MakeTable, optimizer: Any, settings: Any, kind: Any, tmp_path: Path
) -> None:
    trained = table(optimizer, settings, padding=-1)
    train(trained)
    trained.save(tmp_path / "saved", kind=kind)
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} == {f".{kind}", ".json"}
    loaded = RowTable.load(tmp_path / "saved", device="cpu")
    assert loaded.scalars == trained.scalars
    assert isinstance(loaded.weights, PinnedStore)
    train(trained)
    train(loaded)
    for name, wanted in everything(trained).items():
        assert torch.equal(everything(loaded)[name], wanted), name
    assert loaded.scalars == trained.scalars
    assert loaded.lookup([-1]).tolist() == [[0, 0, 0]]


def test_a_save_inside_a_loop_is_of_that_moment(table: MakeTable, moving: dict[str, Any], tmp_path: Path) -> None:
    trained = table(optim.Adam, {"lr": 0.1})
    for batch in trained.batches(IDS, **moving):
        (batch.lookup() ** 2).sum().backward()
        if batch.number == 2:
            trained.save(tmp_path / "saved")
        batch.step()
    reference = table(optim.Adam, {"lr": 0.1})
    train(reference, IDS[:2])
    loaded = RowTable.load(tmp_path / "saved", device="cpu")
    for name, wanted in everything(reference).items():
        assert torch.equal(everything(loaded)[name], wanted), name
    assert loaded.scalars == {"step": 2.0}


def test_a_scheduled_rate_is_saved_as_it_is(table: MakeTable, tmp_path: Path) -> None:
    trained = table()
    scheduler = optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5)
    trained.optimizer.step()
    scheduler.step()
    trained.save(tmp_path / "saved")
    assert RowTable.load(tmp_path / "saved").optimizer.param_groups[0]["lr"] == 0.25
    assert RowTable.load(tmp_path / "saved", optimizer_args={"lr": 3.0}).optimizer.param_groups[0]["lr"] == 3


def test_stochastic_dice_go_on_where_they_were(tmp_path: Path) -> None:
    def make() -> RowTable:
        return RowTable(torch.ones(20, 3, dtype=torch.bfloat16), optim.SGD, {"lr": 1e-3}, rounding="stochastic", device="cpu")

    whole, first = make(), make()
    train(whole, IDS + IDS)
    train(first, IDS)
    first.save(tmp_path / "saved")
    second = RowTable.load(tmp_path / "saved", device="cpu")
    train(second, IDS)
    assert torch.equal(second.lookup(range(20)), whole.lookup(range(20)))
    assert second.weights.dtype == torch.bfloat16


def test_weights_and_state_load_into_places_of_the_users_choice(table: MakeTable, tmp_path: Path) -> None:
    trained = table(optim.Adam, {"lr": 0.1})
    train(trained)
    trained.save(tmp_path / "saved")
    mine = ArrayStore(torch.zeros(20, 3))
    loaded = RowTable.load(tmp_path / "saved", mine, state=tmp_path / "state", device="cpu")
    assert loaded.weights is mine
    assert torch.equal(everything(loaded)["exp_avg_sq"], everything(trained)["exp_avg_sq"])
    assert (tmp_path / "state" / "exp_avg.npy").is_file()
    in_file = RowTable.load(tmp_path / "saved", tmp_path / "w.npy", device="cpu")
    assert torch.equal(in_file.lookup(range(20)), trained.lookup(range(20)))
    with pytest.raises(ValueError, match="the saved table is"):
        RowTable.load(tmp_path / "saved", torch.zeros(5, 3))


def test_a_table_that_was_never_trained_is_saved_without_state(table: MakeTable, tmp_path: Path) -> None:
    table(optim.Adam).save(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"weight.npy", "table.json"}
    loaded = RowTable.load(tmp_path / "saved", device="cpu")
    train(loaded)
    assert loaded.scalars == {"step": 4.0}


def test_a_loaded_table_can_be_saved_again_before_it_is_trained(table: MakeTable, tmp_path: Path) -> None:
    trained = table(optim.Adam)
    train(trained)
    trained.save(tmp_path / "saved")
    RowTable.load(tmp_path / "saved").save(tmp_path / "again")
    loaded = RowTable.load(tmp_path / "again", device="cpu")
    assert loaded.scalars == {"step": 4.0}
    assert torch.equal(everything(loaded)["exp_avg"], everything(trained)["exp_avg"])


def test_a_save_replaces_an_earlier_one_whole_and_nothing_else(table: MakeTable, tmp_path: Path) -> None:
    trained = table(optim.Adam)
    target = tmp_path / "saved"
    trained.save(target)
    train(trained)
    trained.save(target, kind="zarr")
    assert RowTable.load(target).scalars == {"step": 4.0}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match="no saved table"):
        trained.save(tmp_path / "other")
    with pytest.raises(ValueError, match="kind"):
        trained.save(tmp_path / "new", kind="npz")  # type: ignore[arg-type]


def test_a_save_that_fails_leaves_the_one_before(table: MakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = table(optim.Adam)
    train(trained)
    trained.save(tmp_path / "saved")
    train(trained)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rowferry.pipeline._table_save.json.dump", full)
        with pytest.raises(OSError, match="No space"):
            trained.save(tmp_path / "saved")
    assert RowTable.load(tmp_path / "saved").scalars == {"step": 4.0}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_save_does_not_replace_files_that_a_table_lives_in(table: MakeTable, tmp_path: Path) -> None:
    table().save(tmp_path / "saved")
    living = RowTable(tmp_path / "saved" / "weight.npy", optim.SGD, {"lr": 0.5}, device="cpu")
    with pytest.raises(BlockingIOError):
        living.save(tmp_path / "saved")
    train(living)
    living.weights.close()
    with open_store(tmp_path / "saved" / "weight.npy") as store:
        assert not torch.equal(store.gather([1]), torch.tensor([[100.0, 101, 102]]))


def test_only_optimizers_of_torch_are_made_from_the_file(table: MakeTable, tmp_path: Path) -> None:
    class Mine(optim.SGD):
        pass

    table(Mine, {"lr": 0.5}).save(tmp_path / "saved")
    with pytest.raises(ValueError, match="pass optimizer="):
        RowTable.load(tmp_path / "saved")
    assert type(RowTable.load(tmp_path / "saved", optimizer=Mine, optimizer_args={"lr": 1.0}).optimizer) is Mine
    file = tmp_path / "saved" / "table.json"
    for name in ("lr_scheduler", "Optimizer.__init__", "os", "__name__"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "optimizer": name}))
        with pytest.raises(ValueError, match="pass optimizer="):
            RowTable.load(tmp_path / "saved")


def test_a_broken_or_foreign_file_is_refused(table: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no saved table"):
        RowTable.load(tmp_path)
    table().save(tmp_path / "saved")
    file = tmp_path / "saved" / "table.json"
    good = json.loads(file.read_text())
    outside = {**good["columns"], "weight": ["../weight.npy", "float32"]}
    changes: tuple[dict[str, Any], ...] = ({"version": 2}, {"columns": outside}, {"columns": {}}, {"extra": 1}, {"columns": 3})
    for change in changes:
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match="cannot be read as a saved table"):
            RowTable.load(tmp_path / "saved")


def test_another_optimizer_than_was_saved_is_refused_when_training_begins(table: MakeTable, tmp_path: Path) -> None:
    trained = table(optim.Adam)
    train(trained)
    trained.save(tmp_path / "saved")
    for other in (optim.Adagrad, optim.NAdam):  # with other columns, with other scalars
        loaded = RowTable.load(tmp_path / "saved", optimizer=other, device="cpu")
        with pytest.raises(ValueError, match="Load it with the optimizer"):
            loaded.batches(IDS)
