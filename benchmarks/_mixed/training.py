"""Train one model in one precision, and test it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from _common import synchronize
from torch import Tensor, nn

import rowferry as rf

from .precision import Name, Stepper

WARMING = 0.3  # share of the steps in which the learning rate rises; then it falls to zero


class Task(Protocol):
    """What is trained: a model, its data, its optimizer."""

    @property
    def name(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def clip(self) -> float | None: ...
    def model(self) -> nn.Module: ...
    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer: ...
    def pipeline(self, part: str, dtype: torch.dtype, device: torch.device) -> rf.Pipeline: ...
    def random(self, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]: ...
    def forward(self, model: nn.Module, batch: Any, *, train: bool) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Trained:
    """How a training went. ``seconds_an_epoch`` is the median without the first epoch, if there are others."""

    seconds_an_epoch: float
    train_loss: float
    test_loss: float
    test_accuracy: float
    data_waited_share: float
    steps: int
    loss_scale: float  # at the end; 1 without scaling


def prepared(task: Task, precision: Name, device: torch.device, seed: int = 0) -> Stepper:
    """A new model of ``task``; with the same ``seed`` the same weights in every precision."""
    torch.manual_seed(seed)
    return Stepper(task.model().to(device), precision, task.optimizer, device, task.clip)


def loss_of(task: Task, stepper: Stepper, batch: Any, *, train: bool) -> tuple[Tensor, Tensor]:
    """The loss in float32, and how many were right."""
    with stepper.computing():
        scores, wanted = task.forward(stepper.model, batch, train=train)
    scores = scores.float()
    return nn.functional.cross_entropy(scores, wanted), (scores.detach().argmax(1) == wanted).float().mean()


def train(task: Task, precision: Name, device: torch.device, epochs: int, seed: int = 0) -> Trained:
    """Train for ``epochs`` and test.

    Raises:
        ValueError: there is no whole batch of training data.
    """
    stepper = prepared(task, precision, device, seed)
    first_rate = stepper.optimizer.param_groups[0]["lr"]
    seconds = []
    total = torch.zeros((), device=device)
    with task.pipeline("train", stepper.dtype, device) as pipe:
        steps = epochs * len(pipe)
        if not steps:
            raise ValueError(f"{task.name}: a batch of {task.batch} is more than there is to train with")
        for epoch in range(epochs):
            stepper.model.train()
            total.zero_()
            synchronize()
            start = time.perf_counter()
            for batch in pipe:
                done = (epoch * len(pipe) + batch.number + 1) / steps
                for group in stepper.optimizer.param_groups:
                    group["lr"] = first_rate * min(done / WARMING, (1 - done) / (1 - WARMING))
                loss, _ = loss_of(task, stepper, batch, train=True)
                stepper.step(loss)
                total += loss.detach()
            synchronize()
            seconds.append(time.perf_counter() - start)
        stats = pipe.stats()
        train_loss = float(total / len(pipe))
    test_loss, accuracy = test(task, stepper, device)
    return Trained(
        seconds_an_epoch=statistics.median(seconds[1:] or seconds),
        train_loss=train_loss,
        test_loss=test_loss,
        test_accuracy=accuracy,
        data_waited_share=stats.waited / stats.seconds,
        steps=steps,
        loss_scale=stepper.scaler.get_scale(),
    )


@torch.no_grad()
def test(task: Task, stepper: Stepper, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over the test part, each batch weighted by its size."""
    stepper.model.eval()
    loss, right, count = torch.zeros((), device=device), torch.zeros((), device=device), 0
    with task.pipeline("test", stepper.dtype, device) as pipe:
        for batch in pipe:
            batch_loss, batch_right = loss_of(task, stepper, batch, train=False)
            rows = len(batch.index)
            loss += batch_loss * rows
            right += batch_right * rows
            count += rows
    return float(loss / count), float(right / count)
