"""A table on disk whose weights, state and counters go on from the last flush after a crash."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import rowferry as rf

ROWS, IDS = 40, [torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
COLUMNS = ("weight", "exp_avg", "exp_avg_sq")


def open_all(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.npy" for name in COLUMNS}
    return {
        name: rf.open_store(path, "r+", durability="atomic")
        if path.exists()
        else rf.create_store(path, (ROWS, 3), torch.float32, durability="atomic")
        for name, path in paths.items()
    }


def table_over(stores: dict[str, Any], **options: Any) -> rf.RowTable:
    state = {name: stores[name] for name in COLUMNS[1:]}
    return rf.RowTable(stores["weight"], torch.optim.Adam, {"lr": 0.1}, state=state, device="cpu", **options)


def train(table: rf.RowTable, batches: Any, *, flush_after: int = 0, stop_after: int = 0) -> None:
    for number, batch in enumerate(batches, 1):
        (batch.lookup() - batch.index.unsqueeze(1)).square().sum().backward()
        batch.step()
        if number == flush_after:
            table.flush()
        if number == stop_after:
            return


def contents(folder: Path) -> list[torch.Tensor]:
    return [rf.open_store(folder / f"{name}.npy").gather(slice(None)) for name in COLUMNS]


@pytest.mark.parametrize("options", [{}, {"mover": "copy"}], ids=["local", "copy"])
def test_a_table_goes_on_from_its_last_flush_bit_for_bit(tmp_path: Path, options: Any) -> None:
    stores = open_all(tmp_path / "whole")
    table = table_over(stores)
    train(table, table.batches(IDS, **options), flush_after=len(IDS))

    stores = open_all(tmp_path / "cut")
    table = table_over(stores)
    train(table, table.batches(IDS, **options), flush_after=4, stop_after=6)
    del stores, table  # as a crash: two steps are in the files, and no flush covers them
    gc.collect()
    stores = open_all(tmp_path / "cut")
    state = stores["exp_avg"].committed_state
    assert state["position"] == 4
    table = table_over(stores, resume=True)
    assert table.scalars == {"step": 4.0}
    batches = table.batches(IDS, **options)
    batches.load_state_dict(state)
    train(table, batches, flush_after=5)
    assert table.scalars == {"step": 9.0}
    for one, other in zip(contents(tmp_path / "whole"), contents(tmp_path / "cut"), strict=True):
        assert torch.equal(one, other)


def test_stores_that_were_not_committed_together_are_refused(tmp_path: Path) -> None:
    stores = open_all(tmp_path)
    with pytest.raises(ValueError, match="was not committed by a table"):
        table_over(stores, resume=True)
    table = table_over(stores)
    train(table, table.batches(IDS), flush_after=len(IDS))
    with pytest.raises(TypeError, match="a dict of them by column"):
        rf.RowTable(stores["weight"], torch.optim.Adam, resume=True)
    other = rf.create_store(tmp_path / "other.npy", (ROWS, 3), torch.float32, durability="atomic")
    with pytest.raises(ValueError, match=r"state\['exp_avg'\].*other\.npy, was not committed together"):
        table_over({**stores, "exp_avg": other}, resume=True)
    assert table_over(stores, resume=True).scalars == {"step": 9.0}
