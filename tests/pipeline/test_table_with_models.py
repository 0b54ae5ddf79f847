"""A table beside ordinary layers: one optimizer, schedulers, clipping, autocast, GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from rowferry.pipeline import RowTable
from rowferry.stores import PinnedStore

MakeTable = Callable[..., RowTable]


def test_layers_and_table_train_as_one_model(moving: dict[str, Any]) -> None:
    """The same model with nn.Embedding, whose rows are all in each batch, so that dense Adam means the same."""
    torch.manual_seed(0)
    weights = torch.randn(6, 3)
    ids = [torch.randperm(6) for _ in range(10)]

    def losses(rows: Iterator[tuple[Tensor, Callable[[], None]]], layer: nn.Linear) -> list[float]:
        found = []
        for vectors, step in rows:
            loss = (layer(vectors) ** 2).sum()
            loss.backward()
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


# ---- what else works on an optimizer ------------------------------------------------------------------------------


def test_the_optimizer_exists_at_once_and_holds_nothing_of_the_table_between_batches(table: MakeTable) -> None:
    for kind in (optim.Adam, optim.Adagrad):
        trained = table(kind, {"lr": 0.1})
        placeholder = trained.optimizer.param_groups[0]["params"]
        assert [tuple(param.shape) for param in placeholder] == [(0, 3)]
        assert trained.optimizer.state_dict()["state"] == {}
        for batch in trained.batches([[1, 2]]):
            assert trained.optimizer.param_groups[0]["params"] == [batch.weight]
            batch.lookup().sum().backward()
            batch.step()
            after = batch.weight.detach().clone()
            trained.optimizer.step()
            assert torch.equal(batch.weight, after)
        assert trained.optimizer.state_dict()["state"] == {}
        assert len(trained.optimizer.state) == 0
        assert trained.scalars == {"step": 1.0}


def test_a_scheduler_changes_the_rate_and_an_optimizer_state_goes_back_in(table: MakeTable, moving: dict[str, Any]) -> None:
    trained = table()
    scheduler = optim.lr_scheduler.StepLR(trained.optimizer, 1, gamma=0.5)
    for batch in trained.batches([[1], [1]], **moving):
        batch.lookup().sum().backward()
        batch.step()
        scheduler.step()
        trained.optimizer.load_state_dict(trained.optimizer.state_dict())  # makes new groups
    assert trained.lookup([1])[0, 0].item() == 100 - 0.5 - 0.25
    assert trained.optimizer.param_groups[0]["lr"] == 0.125


def test_an_existing_optimizer_steps_tables_and_layers_once(table: MakeTable, moving: dict[str, Any]) -> None:
    layer = nn.Linear(3, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = optim.SGD(layer.parameters(), lr=0.25)
    one, other = table(optimizer, {"lr": 0.5}), table(optimizer, {"lr": 1.0})
    for batch, second in zip(one.batches([[1]], **moving), other.batches([[1]], **moving), strict=True):
        (batch.lookup().sum() + second.lookup().sum() + layer.weight.sum()).backward()
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) yourself, then batch\.write_back\(\)"):
            batch.step()
        optimizer.step()
        batch.write_back()
        second.write_back()
        optimizer.zero_grad()
        optimizer.step()  # moves nothing: no gradient, and the tables have left
    assert one.lookup([1])[0, 0].item() == 99.5
    assert other.lookup([1])[0, 0].item() == 99
    assert torch.equal(layer.weight, before - 0.25)
    assert set(optimizer.state_dict()["state"]) <= {0}


def test_state_is_found_by_identity_not_by_position(table: MakeTable) -> None:
    frozen, layer = nn.Linear(3, 3), nn.Linear(3, 1)
    for param in frozen.parameters():
        param.requires_grad_(False)
    optimizer = optim.Adam([*frozen.parameters(), *layer.parameters()], lr=0.1)
    trained = table(optimizer)
    for batch in trained.batches([[1, 2], [2, 3, 4]]):
        layer(frozen(batch.lookup())).sum().backward()
        optimizer.step()
        batch.write_back()
        optimizer.zero_grad()
    assert {tuple(state["exp_avg"].shape) for state in optimizer.state.values()} == {(1, 3), (1,)}
    assert trained.state["exp_avg"].gather([1, 2, 3, 4]).any(1).all()
    assert not trained.state["exp_avg"].gather([0, 5]).any()


def test_gradients_of_table_and_layers_are_clipped_together(table: MakeTable, moving: dict[str, Any]) -> None:
    layer = nn.Linear(3, 1)
    optimizer = optim.SGD(layer.parameters(), lr=0.5)
    trained = table(optimizer, padding=-1)
    for batch in trained.batches([[1, -1]], **moving):
        (layer(batch.lookup()).sum() * 100).backward()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert any(param is batch.weight for param in params)
        nn.utils.clip_grad_norm_(params, 1.0)
        assert sum(float((param.grad**2).sum()) for param in params) == pytest.approx(1, abs=1e-3)
        optimizer.step()
        batch.write_back()
    assert (trained.lookup([1]) - torch.tensor([100.0, 101, 102])).norm().item() <= 0.5


# ---- mixed precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), [(optim.Adam, {"lr": 0.1}), (optim.AdamW, {"lr": 0.1, "fused": True})])
def test_a_step_that_the_scaler_skips_leaves_rows_moments_and_counters_as_they_were(
    table: MakeTable, kind: Any, settings: dict[str, Any], moving: dict[str, Any]
) -> None:
    trained = table(kind, settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def everything() -> list[Any]:
        rows = [store.gather(range(20)) for store in (trained.weights, *trained.state.values())]
        return [*rows, trained.scalars]

    for number, batch in enumerate(trained.batches([[1, 2], [2, 3], [1, 3], [3]], **moving)):
        trained.flush()
        before = everything()
        loss = scaler.scale((batch.lookup() ** 2).sum())
        (loss * (float("inf") if number == 2 else 1)).backward()
        batch.step(scaler)
        scaler.update()
        trained.flush()
        same = [a == b if isinstance(a, dict) else torch.equal(a, b) for a, b in zip(before, everything(), strict=True)]
        assert all(same) == (number == 2)
    assert trained.scalars == {"step": 3.0}
    assert scaler.get_scale() == 2


def test_small_updates_are_not_lost_when_the_model_gets_half_precision(moving: dict[str, Any]) -> None:
    weights = torch.ones(4, 2)
    trained = RowTable(weights, optim.SGD, {"lr": 1e-4}, dtype=torch.float16, device="cpu")
    for batch in trained.batches([[1]] * 100, **moving):
        vectors = batch.lookup()
        assert vectors.dtype == torch.float16
        (-vectors.sum()).backward()
        assert batch.weight.grad is not None
        assert batch.weight.grad.dtype == torch.float32
        batch.step()
    trained.flush()
    wanted = torch.ones(2)
    for _ in range(100):
        wanted += 1e-4  # float32 itself
    assert torch.equal(weights[1], wanted)
    assert weights[1].tolist() == pytest.approx([1.01, 1.01], abs=2e-6)


def test_autocast_trains_in_half_precision_on_full_rows(table: MakeTable, moving: dict[str, Any]) -> None:
    layer, trained = nn.Linear(3, 1), table()
    for batch in trained.batches([[1]], **moving):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(batch.lookup())
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert batch.weight.grad.dtype == torch.float32
        batch.step()
    assert not torch.equal(trained.lookup([1]), torch.tensor([[100.0, 101, 102]]))


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_a_fused_step_through_a_scaler_never_makes_the_host_wait(numbered: Callable[..., Tensor], capturable: bool) -> None:
    settings = {"lr": 0.1, "fused": True, "capturable": capturable}
    trained = RowTable(PinnedStore.from_array(numbered(2000, 8)), optim.Adam, settings, device="cuda", padding=-1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    ids = [torch.randint(-1, 2000, (300,)) for _ in range(12)]
    for number, batch in enumerate(trained.batches(ids, pad_rows=64)):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = scaler.scale((batch.lookup() ** 2).sum())
            (loss * (float("inf") if number == 5 else 1.0)).backward()
            batch.step(scaler)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
    assert trained.scalars == {"step": 11.0}
