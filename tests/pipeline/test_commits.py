"""Flushing a pipeline over atomic stores: all of them and its state, as one moment that a crash leads back to."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.stores._commit_state import decode_state, encode_state
from rowferry.stores.testing import FailingStore, OracleStore

MOVERS: list[dict[str, Any]] = [
    {"mover": "local"},
    {"mover": "copy", "staging_bytes": 1 << 20},
    {"lookahead": 0, "mover": "copy"},
]


def open_both(folder: Path) -> dict[str, rf.MemmapStore]:
    stores = {}
    for name in ("w", "m"):
        path = folder / f"{name}.npy"
        store = (
            rf.open_store(path, "r+", durability="atomic")
            if path.exists()
            else rf.create_store(path, (50, 4), torch.float32, durability="atomic")
        )
        assert isinstance(store, rf.MemmapStore)
        stores[name] = store
    return stores


def state_of(store: rf.MemmapStore) -> Any:
    """As of now."""
    return store.committed_state


def step(batch: Any) -> None:
    """Something that depends on the order of steps."""
    batch.values["w"].mul_(0.5).add_(batch.rows.unsqueeze(1) + 1)
    batch.values["m"].add_(batch.values["w"])
    batch.write_back()


def contents(stores: dict[str, rf.MemmapStore]) -> list[torch.Tensor]:
    return [store.gather(slice(None)) for store in stores.values()]


def make(stores: Any, **options: Any) -> rf.Pipeline:
    return rf.Pipeline(stores, batch_size=7, shuffle=True, seed=3, writable=True, device="cpu", **options)


def after(folder: Path, batches: int, **options: Any) -> list[torch.Tensor]:
    """What the stores hold after so many steps of the first epoch, with nothing in between."""
    folder.mkdir()
    stores = open_both(folder)
    with make(stores, **options) as pipe:
        for _, batch in zip(range(batches), pipe, strict=False):
            step(batch)
    return contents(stores)


KILLED = """
import os, signal, sys
import rowferry as rf
stores = {name: rf.open_store(f"{sys.argv[1]}/{name}.npy", "r+", durability="atomic") for name in ("w", "m")}
options = eval(sys.argv[2])
pipe = rf.Pipeline(stores, batch_size=7, shuffle=True, seed=3, writable=True, device="cpu", **options)
for number, batch in enumerate(pipe, 1):
    batch.values["w"].mul_(0.5).add_(batch.rows.unsqueeze(1) + 1)
    batch.values["m"].add_(batch.values["w"])
    batch.write_back()
    if number == 3:
        pipe.flush()
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("options", MOVERS, ids=str)
def test_after_a_kill_stores_and_state_are_those_of_the_last_flush_and_training_goes_on(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for store in open_both(tmp_path).values():
        store.close()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(options)],
        env=os.environ | {"PYTHONPATH": str(Path(rf.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    again = open_both(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(contents(again), after(tmp_path / "three", 3, **options), strict=True))
    state = again["m"].committed_state
    assert state == again["w"].committed_state
    with make(again, **options) as pipe:
        pipe.load_state_dict(state)
        for batch in pipe:
            step(batch)
    assert all(torch.equal(a, b) for a, b in zip(contents(again), after(tmp_path / "whole", 8, **options), strict=True))


@pytest.mark.gpu
def test_on_a_gpu_atomic_stores_go_back_to_the_last_flush(tmp_path: Path) -> None:
    stores = open_both(tmp_path)
    pipe = rf.Pipeline(stores, batch_size=7, shuffle=True, seed=3, writable=True, device="cuda")
    for number, batch in enumerate(pipe, 1):
        batch.values["w"].mul_(0.5).add_((batch.rows.unsqueeze(1) + 1).float())
        batch.values["m"].add_(batch.values["w"])
        batch.write_back()
        if number == 3:
            pipe.flush()
        if number == 5:
            break
    del pipe, batch  # what was written is drained, and not committed
    gc.collect()
    for store in stores.values():
        store.close()
    again = open_both(tmp_path)
    assert state_of(again["m"])["position"] == 3
    assert all(torch.equal(a, b) for a, b in zip(contents(again), after(tmp_path / "three", 3), strict=True))


def test_closing_a_pipeline_commits_with_its_state(tmp_path: Path) -> None:
    stores = open_both(tmp_path)
    with make(stores) as pipe:
        for _, batch in zip(range(2), pipe, strict=False):
            step(batch)
    for store in stores.values():
        store.close()
    state = open_both(tmp_path)["w"].committed_state
    assert (state["epoch"], state["position"]) == (0, 2)


def test_an_error_in_the_loop_commits_nothing_however_the_stores_are_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        stores = open_both(tmp_path)
        with stores["w"], stores["m"], make(stores) as pipe:
            for number, batch in enumerate(pipe, 1):
                step(batch)
                if number == 2:
                    pipe.flush()
                if number == 4:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "no flush() covers" in caplog.text
    again = open_both(tmp_path)
    assert again["w"].committed_state["position"] == 2
    assert all(torch.equal(a, b) for a, b in zip(contents(again), after(tmp_path / "two", 2), strict=True))


def test_other_stores_of_the_pipeline_are_made_durable_before_the_commit_and_hinder_it_when_they_fail(tmp_path: Path) -> None:
    stores = open_both(tmp_path)

    class Unflushable(Exception):
        """The other store could not be made durable."""

    calls: list[bool] = []

    class Flushed:
        """Stands where a store's ``_flush`` is."""

        def __call__(self, sync: bool) -> None:
            calls.append(sync)
            if sync and calls.count(True) == 1:
                raise Unflushable

    other = OracleStore(torch.zeros(50, 4))
    object.__setattr__(other, "_flush", Flushed())
    with make({**stores, "other": other}) as pipe:
        for batch in pipe:
            step(batch)
            break
        with pytest.raises(Unflushable):
            pipe.flush()
        assert state_of(stores["w"]) is None
        pipe.flush()
        assert calls.count(True) == 2
        assert state_of(stores["w"])["position"] == 1


def test_a_drain_that_fails_commits_nothing(tmp_path: Path) -> None:
    stores = open_both(tmp_path)
    failing = FailingStore(OracleStore(torch.zeros(50, 4)), OSError(errno.EIO, "sector 37"), writes=[1])
    with make({**stores, "f": failing}, mover="copy", staging_bytes=1 << 20) as pipe:
        for batch in pipe:
            batch.values["f"].add_(1)
            step(batch)
            break
        with pytest.raises(OSError, match="sector 37"):
            pipe.flush()
        assert state_of(stores["w"]) is None
        pipe.flush()
        assert state_of(stores["w"])["position"] == 1


def test_a_sampler_with_a_state_of_tensors_is_committed_and_one_with_an_object_is_named(tmp_path: Path) -> None:
    class Sampler:
        """Draws from a generator whose state it gives."""

        def __init__(self, extra: Any) -> None:
            self.generator, self.extra = torch.Generator().manual_seed(1), extra

        def __iter__(self) -> Any:
            for _ in range(4):
                yield torch.randint(50, (6,), generator=self.generator)

        def state_dict(self) -> dict[str, Any]:
            return {"generator": self.generator.get_state(), "extra": self.extra}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.set_state(state["generator"])

    stores = open_both(tmp_path)
    with rf.Pipeline(stores, batch_sampler=Sampler((1, b"x")), writable=True, device="cpu") as pipe:
        for batch in pipe:
            step(batch)
        pipe.flush()
    with rf.Pipeline(stores, batch_sampler=Sampler(object()), writable=True, device="cpu") as pipe:
        for batch in pipe:
            step(batch)
            break
        with pytest.raises(TypeError, match=r"state\['sampler'\].*\['extra'\] is a object"):
            pipe.flush()
        pipe._commits.abandon()


def test_a_state_comes_back_from_a_record_as_it_was() -> None:
    state = {
        "a": [1, 2.5, None, True, "x", (1, [2])],
        ("b", 3): {"__rowferry__": 1},
        "t": torch.tensor([[1.5], [float("nan")]], dtype=torch.bfloat16),
        "e": torch.empty(0, 3),
        "n": np.arange(6, dtype=">i4").reshape(2, 3),
        "s": np.float64(0.1),
        "raw": b"\0\xff",
    }
    found = decode_state(encode_state(state))
    assert list(found) == list(state)
    assert found["a"] == state["a"]
    assert found["b", 3] == state["b", 3]
    assert found["raw"] == state["raw"]
    assert float(found["s"]) == 0.1
    assert torch.equal(found["t"].view(torch.int16), torch.as_tensor(state["t"]).view(torch.int16))
    assert (found["e"].shape, found["e"].dtype) == ((0, 3), torch.float32)
    assert np.array_equal(found["n"], np.arange(6).reshape(2, 3))
