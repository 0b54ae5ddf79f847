"""The mixed-precision comparison: three ways to compute, what is trained, and what it is trained with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from _mixed import images, text
from _mixed.precision import NAMES, MasterWeights, Name, Stepper, cast_whole
from _mixed.resnet import DEPTHS, resnet
from _mixed.training import train
from torch import nn

CPU = torch.device("cpu")


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


# ---- precision ------------------------------------------------------------------------------------------------------


def test_a_model_cast_whole_keeps_batch_normalization_in_float32() -> None:
    model = cast_whole(resnet(18, 10, width=8))
    kinds = {type(module): {each.dtype for each in module.parameters(recurse=False)} for module in model.modules()}
    assert kinds[nn.Conv2d] == kinds[nn.Linear] == {torch.float16}
    assert kinds[nn.BatchNorm2d] == {torch.float32}


def test_master_weights_add_up_steps_that_float16_would_lose() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1024)
    stepper = Stepper(model, "half", sgd, CPU)
    for _ in range(8):  # each step is 0.25, a quarter of float16's spacing at 1024
        stepper.step(-0.25 * model(torch.ones(1, 1).half()).float().sum())
    assert model.weight.item() == 1026
    alone = torch.tensor(1024.0, dtype=torch.float16)
    for _ in range(8):
        alone += 0.25
    assert float(alone) == 1024


def test_masters_begin_as_the_weights_before_they_were_rounded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = [each.detach().clone() for each in model.parameters()]
    masters = MasterWeights(model)
    assert all(torch.equal(a, b) for a, b in zip(masters.trained, before, strict=True))
    assert masters.trained[2] is model[1].weight


@pytest.mark.parametrize("precision", ["autocast", "half"])
def test_a_step_whose_gradients_overflow_is_left_out_and_halves_the_scale(precision: Name) -> None:
    model = nn.Linear(1, 1, bias=False)
    stepper = Stepper(model, precision, sgd, CPU)
    before, scale = model.weight.detach().clone(), stepper.scaler.get_scale()
    with stepper.computing():
        loss = model(torch.full((1, 1), 60_000.0, dtype=torch.float16)).float().sum()
    stepper.step(loss)
    assert torch.equal(model.weight, before)
    assert stepper.scaler.get_scale() == scale / 2
    assert all(each.grad is None for each in [*model.parameters(), *stepper.trained])


@pytest.mark.parametrize("precision", NAMES)
def test_gradients_are_unscaled_before_they_are_clipped(precision: Name) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    stepper = Stepper(model, precision, sgd, CPU, clip=0.25)
    with stepper.computing():
        loss = model(torch.tensor([[0.3, 0.4]], dtype=stepper.dtype)).float().sum()
    stepper.step(loss)
    assert torch.allclose(model.weight.float(), torch.tensor([[-0.15, -0.2]]), atol=1e-3)


@pytest.mark.parametrize(("cell", "precision"), [("lstm", "autocast"), *((cell, "half") for cell in text.CELLS)])
def test_float16_learns_as_float32_does(cell: str, precision: Name, tmp_path: Path) -> None:
    text.write(tmp_path, None, 10_000, 16)
    task = text.TextTask(cell, tmp_path, 8, 16, 32, 1)
    plain, low = (train(task, each, CPU, 3) for each in ("fp32", precision))
    assert plain.train_loss < 5 < np.log(256)
    assert low.train_loss == pytest.approx(plain.train_loss, rel=0.02)
    assert low.test_loss == pytest.approx(plain.test_loss, rel=0.02)


# ---- data -----------------------------------------------------------------------------------------------------------


def test_synthetic_images_can_be_told_apart_but_not_at_a_glance() -> None:
    x, y = images.synthetic(3_000, seed=0)
    seen, labels = images.synthetic(500, seed=1)
    means = np.stack([x[y == label].mean(0) for label in range(images.CLASSES)]).reshape(images.CLASSES, -1)
    flat = seen.reshape(len(seen), -1).astype(np.float32)
    nearest = (flat @ means.T - (means**2).sum(1) / 2).argmax(1)  # of the class means
    assert 0.1 < (nearest == labels).mean() < 0.95
    assert x.dtype == np.uint8
    assert x.shape == (3_000, 3, 32, 32)


def test_cifar_100_is_read_from_its_binary_version_and_never_unpickled(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    fine = np.arange(5, dtype=np.uint8) + 90
    records = np.concatenate([np.full((5, 1), 7, np.uint8), fine[:, None], pixels.reshape(5, -1)], axis=1)
    for part in ("train", "test"):
        records.tofile(tmp_path / f"{part}.bin")
    assert "CIFAR-100" in images.write(tmp_path, tmp_path, 4)
    assert np.array_equal(np.load(tmp_path / "train-x.npy"), pixels[:4])
    assert np.array_equal(np.load(tmp_path / "train-y.npy"), fine[:4])
    (tmp_path / "train.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"3 bytes; a multiple of 3,074"):
        images.cifar100(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match="nothing is unpickled"):
        images.cifar100(tmp_path / "cifar-100-python", "train")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_augmented_image_is_a_window_of_the_enlarged_one_or_its_mirror_image(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.rand(16, 3, 32, 32).to(dtype)
    grown, cut = images.resized(x, 18), images.augmented(x, 16)
    assert cut.shape == (16, 3, 16, 16)
    assert cut.dtype == dtype
    assert cut.is_contiguous(memory_format=torch.channels_last)
    flips = 0
    for whole, window in zip(grown, cut, strict=True):
        places = [whole[:, top : top + 16, left : left + 16] for top in range(3) for left in range(3)]
        straight = any(torch.equal(place, window) for place in places)
        mirrored = any(torch.equal(place.flip(2), window) for place in places)
        assert straight or mirrored
        flips += mirrored
    assert 0 < flips < 16


def test_windows_of_text_follow_each_other_and_overlap_by_the_byte_to_tell(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(bytes(range(200)))
    text.write(tmp_path, tmp_path / "words", 200, 10)
    windows = np.load(tmp_path / "train-text.npy")
    assert windows.dtype == np.uint8
    assert windows.shape == (17, 11)
    assert np.array_equal(windows[:, -1][:-1], windows[1:, 0])
    with pytest.raises(ValueError, match="more than one window of 100"):
        text.write(tmp_path, tmp_path / "words", 200, 100)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_residual_network_has_the_depth_of_its_name(depth: int) -> None:
    model = resnet(depth, 100, width=8)
    counted = [each for each in model.modules() if isinstance(each, nn.Conv2d) and each.kernel_size != (1, 1)]
    bottleneck = DEPTHS[depth][1]
    assert len(counted) == (1 + (depth - 2) // 3 if bottleneck else depth - 1)
    with torch.no_grad():
        assert model.eval()(torch.zeros(2, 3, 16, 16)).shape == (2, 100)
