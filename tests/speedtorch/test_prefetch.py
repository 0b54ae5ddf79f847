"""``prefetch``: a loop with it computes what the same loop computes without, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import rowferry.speedtorch as SpeedTorch

ROWS, WIDTH = 40, 3


class Net(nn.Module):
    """Two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Embedding(1, WIDTH)
        self.v = nn.Embedding(1, WIDTH)


class Training:
    """A model, its optimizer and four switchers, the same for the same seed."""

    def __init__(self, device: str, kind: str = "pinned") -> None:
        self.model = Net().to(device)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        rng = torch.Generator().manual_seed(0)
        self.tables: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        for name in ("u", "v"):
            embedding = getattr(self.model, name)
            if kind == "MM":
                self.tables[name] = SpeedTorch.ModelFactoryMM(embedding, ROWS, WIDTH, diskname=name)
            else:
                self.tables[name] = SpeedTorch.ModelFactory(embedding, ROWS, WIDTH, CPUPinn=kind == "pinned")
            self.tables[name].zerosInit()
            self.tables[name]._stores["weight"].scatter(range(ROWS), torch.rand(ROWS, WIDTH, generator=rng))
            self.states[name] = SpeedTorch.OptimizerFactory(self.optimizer, ROWS, WIDTH, self.model, name, CPUPinn=True)
            self.states[name].optInit()

    @property
    def switchers(self) -> list[Any]:
        """As ``prefetch`` takes them."""
        return [(self.tables["u"], self.states["u"]), (self.tables["v"], self.states["v"])]

    def loop(self, batches: Iterable[Any]) -> None:
        """What a script does. An item is the indexes of ``u``, and positives and negatives of ``v``."""
        for u, (positive, negative) in batches:
            for what in (self.tables["u"], self.states["u"]):
                what.beforeForwardPass(u)
            for what in (self.tables["v"], self.states["v"]):
                what.beforeForwardPass(positive, negative)
            self.optimizer.zero_grad()
            loss = (self.model.u.weight.sin().sum() - self.model.v.weight.exp().mean()).square()
            loss.backward()
            self.optimizer.step()
            for what in (self.tables["u"], self.states["u"]):
                what.afterOptimizerStep(u)
            for what in (self.tables["v"], self.states["v"]):
                what.afterOptimizerStep(positive, negative)

    def result(self) -> list[bytes]:
        """All that was trained."""
        arrays = [table.getNumpyVersion() for table in self.tables.values()]
        arrays += [array for state in self.states.values() for array in state.getNumpyVersion()]
        return [array.tobytes() for array in arrays]


def batches_of(seed: int, count: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, ROWS, rng.integers(1, 9)), (rng.integers(0, ROWS, (2, 2)), rng.integers(-5, ROWS, 3)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("lookahead", [0, 1, 5, "auto"])
@pytest.mark.parametrize("kind", ["pinned", "MM", "device"])
def test_a_loop_computes_the_same_bits_with_it(kind: str, lookahead: Any, device: str, folder: Path) -> None:
    batches = batches_of(1, 25)
    plain, ahead = Training(device, kind), Training(device, kind)
    plain.loop(batches)
    ahead.loop(SpeedTorch.prefetch(ahead.switchers, batches, lookahead=lookahead))
    assert ahead.result() == plain.result()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), count=st.integers(0, 12), depth=st.integers(1, 3))
def test_any_batches_and_depth(seed: int, count: int, depth: int) -> None:
    batches = batches_of(seed, count)
    plain, ahead = Training("cpu"), Training("cpu")
    plain.loop(batches)
    ahead.loop(SpeedTorch.prefetch(ahead.switchers, batches, depth=depth, lookahead=4))
    assert ahead.result() == plain.result()


@pytest.mark.gpu
def test_a_long_loop_on_a_gpu_with_windows_that_share_rows() -> None:
    batches = batches_of(3, 300)
    plain, ahead = Training("cuda"), Training("cuda")
    plain.loop(batches)
    ahead.loop(SpeedTorch.prefetch(ahead.switchers, batches, staging_bytes=64_000))
    assert ahead.result() == plain.result()


def test_the_order_and_kind_of_items_is_kept_and_epochs_repeat(device: str) -> None:
    training = Training(device)
    items = [{"rows": np.array([number]), "label": str(number)} for number in range(5)]
    ahead = SpeedTorch.prefetch(training.tables["u"], items, index=lambda item: item["rows"])
    assert len(ahead) == 5
    for _ in range(2):
        for item, same in zip(items, ahead, strict=True):
            assert same is item
            training.tables["u"].beforeForwardPass(item["rows"])
    assert training.tables["u"]._ahead is None


def test_what_was_written_is_seen_inside_the_turn_and_saved_inside_the_loop(device: str, folder: Path) -> None:
    training = Training(device)
    table, weight = training.tables["u"], training.model.u.weight
    seen = []
    for (index,) in zip(SpeedTorch.prefetch(table, [np.array([1, 2, 1]), np.array([2, 3])]), strict=True):
        table.beforeForwardPass(index)
        weight.data.copy_(torch.arange(len(index) * WIDTH).reshape(-1, WIDTH))
        table.afterOptimizerStep(index)
        table.beforeForwardPass(index)
        seen.append(weight.data[:, 0].tolist())
        table.beforeForwardPass(np.array([39, *index]))  # others: on demand, behind what was written
        assert weight.data[1:, 0].tolist() == seen[-1]
        table.saveCupy("table")
        assert np.load("table.npy")[index, 0].tolist() == seen[-1]
    assert seen == [[6, 3, 6], [0, 3]]
    assert table.getNumpyVersion()[[1, 2, 3], 0].tolist() == [6, 0, 3]


def test_rows_written_under_other_indexes_are_refused(device: str) -> None:
    table = Training(device).tables["u"]
    for index in SpeedTorch.prefetch(table, [np.array([1, 2])]):
        table.beforeForwardPass(index)
        with pytest.raises(RuntimeError, match="other indexes"):
            table.afterOptimizerStep(np.array([2, 1]))
        table.model_variable.weight.data = table.model_variable.weight.data[:1]
        with pytest.raises(ValueError, match="1 rows; the indexes name 2"):
            table.afterOptimizerStep(index)
        with pytest.raises(RuntimeError, match="inside a prefetch loop"):
            table.zerosInit()


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_loop_that_ends_early_has_its_rows_in_the_table(how: str, device: str) -> None:
    training = Training(device)
    table = training.tables["u"]

    def loop() -> None:
        for index in SpeedTorch.prefetch(table, [np.array([number]) for number in range(20)]):
            table.beforeForwardPass(index)
            table.model_variable.weight.data.fill_(7)
            table.afterOptimizerStep(index)
            if index[0] == 4:
                if how == "break":
                    break
                raise KeyError("stop")

    if how == "error":
        with pytest.raises(KeyError, match="stop"):
            loop()
    else:
        loop()
    assert (table.getNumpyVersion() == 7).all(1).nonzero()[0].tolist() == [0, 1, 2, 3, 4]
    table.beforeForwardPass(np.array([4, 30]))
    assert table.model_variable.weight.data[0].tolist() == [7] * WIDTH


def test_the_scripts_arrays_may_change_once_the_turn_is_over(device: str) -> None:
    table = Training(device).tables["u"]
    reused = np.zeros(2, np.int64)

    def draw() -> Iterator[Any]:
        for number in range(6):
            reused[:] = number, number + 10
            yield reused.copy() if number % 2 else torch.from_numpy(reused.copy())

    for index in SpeedTorch.prefetch(table, draw()):
        table.beforeForwardPass(index)
        table.model_variable.weight.data.fill_(5)
        table.afterOptimizerStep(index)
        index[:] = 39
    assert (table.getNumpyVersion() == 5).all(1).nonzero()[0].tolist() == [*range(6), *range(10, 16)]


def test_errors_of_items_come_at_their_turn(device: str) -> None:
    training = Training(device)
    table = training.tables["u"]
    batches = iter(SpeedTorch.prefetch(table, [np.array([1]), np.array([40])]))
    table.beforeForwardPass(next(batches))
    with pytest.raises(IndexError, match="row 40 is out of range"):
        next(batches)
    with pytest.raises(ValueError, match="3 indexes for 2 entries"):
        list(SpeedTorch.prefetch(training.switchers, [([1], [2], [3])]))
    with pytest.raises(TypeError, match="was given a DataGadget"):
        SpeedTorch.prefetch([SpeedTorch.DataGadget("x.npy")], [])
    with pytest.raises(TypeError, match="was given none"):
        SpeedTorch.prefetch([], [])
    with pytest.raises(ValueError, match="named twice"):
        SpeedTorch.prefetch([table, table], [])
    with pytest.raises(RuntimeError, match="holds nothing yet"):
        list(SpeedTorch.prefetch(SpeedTorch.ModelFactory(nn.Embedding(1, 3), ROWS, 3), [[1]]))
