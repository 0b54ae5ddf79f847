"""What trainers ask of the loader that they are given; ``docs/recipes.md`` runs the trainers themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rowferry as rf
from rowferry.pipeline import Pipeline

ROOT = Path(__file__).parents[2]

Make = Callable[..., Pipeline]


def rest(pipe: Pipeline) -> list[list[int]]:
    return [batch.index.tolist() for batch in pipe]


def test_a_pipeline_and_a_prefetcher_tell_their_torch_device(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(8), batch_size=4) as pipe:
        assert pipe.device == torch.device("cpu")
    assert rf.prefetch([], device="cpu").device == torch.device("cpu")


def test_no_private_name_is_taken_for_one_that_fastai_asks_its_loaders_for(numbered: Callable[..., Tensor]) -> None:
    loaders: tuple[Any, ...] = (Pipeline(numbered(8), batch_size=4, device="cpu"), rf.prefetch([], device="cpu"))
    for loader in loaders:
        assert not hasattr(loader, "_device")  # DataLoaders.device falls back on it, and wants a torch.device


def test_asking_whether_it_can_be_iterated_over_skips_no_epoch(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        first, second = rest(pipe), rest(pipe)
        pipe.set_epoch(0)
        iter(pipe)
        iter(pipe)
        assert rest(pipe) == first
        iter(pipe)
        assert rest(pipe) == second


def test_asking_does_not_lose_a_place_that_was_loaded(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        first, second = rest(pipe), rest(pipe)
        pipe.set_epoch(0)
        running = iter(pipe)
        seen = [next(running).index.tolist() for _ in range(3)]
        state = pipe.state_dict()
        pipe.load_state_dict(state)
        iter(pipe)
        assert pipe.state_dict() == state
        assert seen + rest(pipe) == first
        assert rest(pipe) == second


def test_an_epoch_left_after_a_batch_is_over(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=True) as pipe:
        _, second = rest(pipe), rest(pipe)
        pipe.set_epoch(0)
        next(iter(pipe))
        assert rest(pipe) == second


def test_a_batch_is_cut_by_slices_as_learners_do(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline((numbered(8), numbered(8)), batch_size=4) as pipe:
        for batch in pipe:
            inputs, targets = batch[:1], batch[1:]
            assert (len(inputs), len(targets), len(batch)) == (1, 1, 2)
            assert torch.equal(inputs[0], targets[0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_place_can_be_kept_in_a_file_that_torch_loads_safely(
    pipeline: Make, numbered: Callable[..., Tensor], tmp_path: Any, shuffle: bool
) -> None:
    with pipeline(numbered(40), batch_size=4, shuffle=shuffle) as pipe:
        running = iter(pipe)
        next(running)
        torch.save(pipe.state_dict(), tmp_path / "state.pt")
        left = [batch.index.tolist() for batch in running]
        pipe.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert rest(pipe) == left


STOPPED_AND_RESUMED = """
import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import rowferry as rf

rows = np.arange(320, dtype=np.float32).reshape(160, 2)


class Stop(Exception):
    pass


class Recording(lightning.LightningModule):
    def __init__(self, stop):
        super().__init__()
        self.layer, self.stop, self.seen = torch.nn.Linear(2, 1), stop, []

    def training_step(self, batch, number):
        if len(self.seen) == self.stop:
            raise Stop
        self.seen.append((self.current_epoch, batch.number, batch.index.tolist()))
        return self.layer(batch.data / 320).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(stop=None, checkpoint=None):
    keep = ModelCheckpoint("kept", filename="at", every_n_train_steps=14, save_top_k=1, enable_version_counter=False)
    module, pipe = Recording(stop), rf.Pipeline(rows, batch_size=16, shuffle=True, device="cpu")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", callbacks=[keep], **quiet)
    try:
        trainer.fit(module, pipe, ckpt_path=checkpoint)
    except Stop:
        pass
    return module.seen


with rf.Pipeline(rows, batch_size=16, shuffle=True, device="cpu") as plain:
    wanted = [(epoch, batch.number, batch.index.tolist()) for epoch in range(3) for batch in plain]
assert fit() == wanted
assert len(fit(stop=17)) == 17
resumed = fit(checkpoint="kept/at.ckpt")
assert resumed == wanted[14:], (len(resumed), resumed[0][:2])
"""


def test_lightning_sees_the_order_of_a_plain_loop_and_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed; pip install 'rowferry[recipes]' brings it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", STOPPED_AND_RESUMED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
