"""Three ways to compute: float32, autocast, and a model cast whole to float16 with float32 master weights.

In all three the loss is float32. The two float16 ways scale it, so that small gradients do not become zero; the scale adapts
by torch's ``GradScaler``: halved after an overflow, whose step is left out, and doubled after 2,000 steps without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Name = Literal["fp32", "autocast", "half"]
NAMES: tuple[Name, ...] = get_args(Name)
FIRST_SCALE = 2.0**14


class MasterWeights:
    """Float32 copies of a float16 model's parameters: an optimizer steps on them, the model computes with its own.

    The model's parameters are float16 afterwards; those of batch normalization stay float32 and are trained as they are.
    A step of float16 weights in place would be lost wherever it is smaller than half a unit in the last place: at a
    learning rate of 1e-3, mostly.
    """

    def __init__(self, model: nn.Module) -> None:
        """Cast ``model``, which is float32, by ``cast_whole``; the masters keep its weights unrounded."""
        before = [parameter.detach().clone() for parameter in model.parameters()]
        pairs = list(zip(cast_whole(model).parameters(), before, strict=True))
        self.trained = [own if own.dtype == torch.float32 else nn.Parameter(value) for own, value in pairs]
        self._low: list[Tensor] = [own for own, _ in pairs if own.dtype != torch.float32]
        self._high: list[Tensor] = [master for master, (own, _) in zip(self.trained, pairs, strict=True) if own is not master]

    def take_gradients(self) -> None:
        """The model's gradients become the masters', in float32; the model's are dropped."""
        for low, high in zip(self._low, self._high, strict=True):
            high.grad = None if low.grad is None else low.grad.to(torch.float32)
            low.grad = None

    def give_weights(self) -> None:
        """Round the masters into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self._low, self._high)


def cast_whole(model: nn.Module) -> nn.Module:
    """``model`` in float16, batch normalization left in float32: its sums over a batch overflow or round away."""
    model.half()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    return model


class Stepper:
    """A model prepared for one way to compute, and its steps.

    Args:
        model: float32, on its device; ``half`` casts it in place.
        make_optimizer: makes the optimizer of the float32 parameters that it is given.
        clip: largest norm of all gradients together; None leaves them.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Name,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        device: torch.device,
        clip: float | None = None,
    ) -> None:
        self.model, self.precision, self.device, self.clip = model, precision, device, clip
        self.masters = MasterWeights(model) if precision == "half" else None
        self.trained = self.masters.trained if self.masters else list(model.parameters())
        self.optimizer = make_optimizer(self.trained)
        self.scaler = torch.amp.GradScaler(device.type, FIRST_SCALE, enabled=precision != "fp32")

    @property
    def dtype(self) -> torch.dtype:
        """What inputs are cast to on their way to the device."""
        return torch.float32 if self.precision == "fp32" else torch.float16

    def computing(self) -> AbstractContextManager[None]:
        """Around the forward pass, not around the step."""
        if self.precision == "autocast":
            return torch.autocast(self.device.type, torch.float16)
        return nullcontext()

    def step(self, loss: Tensor) -> None:
        """Backward, unscale, clip, update. ``loss`` is float32."""
        self.scaler.scale(loss).backward()
        if self.masters:
            self.masters.take_gradients()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.trained, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.masters:
            self.masters.give_weights()
        self.optimizer.zero_grad()
