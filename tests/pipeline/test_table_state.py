"""Where a table and its state live: devices, stores, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from rowferry.pipeline import RowTable
from rowferry.stores import ArrayStore, DeviceStore, PinnedStore

MakeTable = Callable[..., RowTable]


def test_a_device_that_is_not_there_is_refused_and_fixes_nothing(table: MakeTable) -> None:
    trained = table(device=None)
    with pytest.raises(ValueError, match="cuda:99"):
        trained.batches([[1]], device="cuda:99")
    assert "no device yet" in repr(trained)
    assert trained.lookup([1], device="cpu").device.type == "cpu"
    assert "on cpu" in repr(trained)


@pytest.mark.gpu
def test_the_device_is_fixed_once(table: MakeTable) -> None:
    trained = table(device=None)
    trained.batches([[1]], device="cpu")
    with pytest.raises(ValueError, match="is on cpu and cannot be used on cuda:0"):
        trained.lookup([1], device="cuda")


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
    with pytest.raises(FileExistsError, match=r"RowTable\.load"):
        again.batches([[1]])
    mine = PinnedStore.zeros((20, 3), torch.float32)
    trained = table(optim.Adagrad, {"initial_accumulator_value": 0.5}, state={"sum": mine})
    trained.batches([[1]])
    assert torch.equal(mine.torch(), torch.full((20, 3), 0.5))
    for bad in ({}, {"sum": mine, "other": mine}, {"sum": torch.zeros(20, 2)}, {"sum": torch.zeros(20, 3).double()}):
        with pytest.raises(ValueError, match=r"state"):
            table(optim.Adagrad, state=bad).batches([[1]])
