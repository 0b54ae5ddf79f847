"""Images of CIFAR-100's shape in .npy files, and the task of telling their classes apart.

Files hold uint8: ``x`` is ``(n, 3, 32, 32)``, ``y`` is ``(n,)``. A pipeline casts them on the way; they are resized and
augmented on the device, after ``next()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import rowferry as rf

from .resnet import resnet

CLASSES, SIDE = 100, 32
RECORD = 2 + 3 * SIDE * SIDE  # CIFAR-100's binary version: coarse label, fine label, pixels
MARGIN = 8  # a training image is enlarged by an eighth and a random window of it is taken

Part = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def cifar100(folder: Path, part: str) -> Part:
    """Images and fine labels of ``train.bin`` or ``test.bin``. The pickled version is refused: loading it runs code.

    Raises:
        FileNotFoundError, ValueError: no such file, or one whose length is not a whole number of records.
    """
    path = folder / f"{part}.bin"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; --data takes the folder of CIFAR-100's binary version (cifar-100-binary, with train.bin and "
            "test.bin). The Python version is pickled, and nothing is unpickled here"
        )
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % RECORD:
        raise ValueError(f"{path} has {len(data):,} bytes; a multiple of {RECORD:,} is expected")
    records = data.reshape(-1, RECORD)
    return records[:, 2:].reshape(-1, 3, SIDE, SIDE).copy(), records[:, 1].copy()


def synthetic(count: int, seed: int) -> Part:
    """Images that can be learnt: each class has a smooth pattern, shifted, faded and buried in noise for each image."""
    smooth = torch.randn(CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(0))  # the same patterns for every part
    patterns = nn.functional.interpolate(smooth, (SIDE, SIDE), mode="bicubic").numpy()
    dice = np.random.default_rng(seed)
    labels = dice.integers(0, CLASSES, count).astype(np.uint8)
    images = np.empty((count, 3, SIDE, SIDE), np.uint8)
    for place, label in enumerate(labels):
        shifted = np.roll(patterns[label], dice.integers(-4, 5, 2), axis=(1, 2))
        noise = dice.standard_normal((3, SIDE, SIDE), dtype=np.float32)
        images[place] = np.clip(128 + dice.uniform(10, 28) * shifted + 55 * noise, 0, 255)
    return images, labels


def write(folder: Path, data: Path | None, count: int) -> str:
    """Write ``{train,test}-{x,y}.npy`` and say what is in them; ``count`` training images, or at most so many real ones."""
    for seed, (part, most) in enumerate({"train": count, "test": max(count // 5, 1)}.items()):
        images, labels = synthetic(most, seed) if data is None else cifar100(data, part)
        np.save(folder / f"{part}-x.npy", images[:most])
        np.save(folder / f"{part}-y.npy", labels[:most])
    if data is None:
        return (
            f"images: synthetic, {count:,} of CIFAR-100's shape with {CLASSES} learnable classes (--data takes the real ones)"
        )
    return f"images: CIFAR-100 from {data}, at most {count:,}"


@dataclass(frozen=True)
class ImageTask:
    """A residual network of ``depth`` layers on images of ``size`` pixels a side."""

    name: str
    depth: int
    folder: Path
    batch: int
    size: int
    width: int
    clip: None = None

    def model(self) -> nn.Module:
        """In the memory format that tensor cores prefer, for every precision alike."""
        return resnet(self.depth, CLASSES, self.width).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def pipeline(self, part: str, dtype: torch.dtype, device: torch.device) -> rf.Pipeline:
        """uint8 in the file, ``dtype`` on the device."""
        source = {"image": self.folder / f"{part}-x.npy", "label": self.folder / f"{part}-y.npy"}
        casts = {"image": dtype, "label": torch.int64}
        train = part == "train"
        return rf.Pipeline(source, batch_size=self.batch, shuffle=train, drop_last=train, dtype=casts, device=device)

    def random(self, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """A batch of noise, to try how many fit."""
        image = torch.rand(batch, 3, SIDE, SIDE, device=device).mul_(255).to(dtype)
        return {"image": image, "label": torch.randint(CLASSES, (batch,), device=device)}

    def forward(self, model: nn.Module, batch: Any, *, train: bool) -> tuple[Tensor, Tensor]:
        """Scores ``(n, classes)`` and labels ``(n,)``."""
        images = (batch["image"] - 128) / 64
        return model(augmented(images, self.size) if train else resized(images, self.size)), batch["label"]


def resized(images: Tensor, size: int) -> Tensor:
    """``(n, 3, size, size)``, channels last."""
    grown = nn.functional.interpolate(images, (size, size), mode="bilinear")
    return grown.contiguous(memory_format=torch.channels_last)


def augmented(images: Tensor, size: int) -> Tensor:
    """Resized to an eighth more than ``size``, then a random window, flipped for half of them: ``(n, 3, size, size)``."""
    margin = size // MARGIN
    grown = resized(images, size + margin)
    count, device = len(images), images.device
    top, left = torch.randint(margin + 1, (2, count, 1), device=device)
    across = torch.arange(size, device=device).expand(count, size)
    flipped = torch.rand(count, 1, device=device) < 0.5
    rows, columns = top + across, left + torch.where(flipped, size - 1 - across, across)
    each = torch.arange(count, device=device)[:, None, None]
    return grown[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # channels last, by the way it indexes
