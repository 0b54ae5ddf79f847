"""Residual networks for small images: He et al. 2015, with the stem that is usual for CIFAR.

The stem is one 3 x 3 convolution of stride 1 without pooling, where the ImageNet networks begin with 7 x 7 of stride 2 and a
pooling of stride 2: an image of 32 x 32 would be 8 x 8 before the first block. The rest is as published.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

# Blocks in each of the four stages, and whether a block is a bottleneck (1 x 1, 3 x 3, 1 x 1) or two 3 x 3.
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
WIDENING = 4  # a bottleneck's output has this many times the channels of its middle


class Block(nn.Module):
    """``relu(x + branch(x))``; the shortcut is a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        convolution = partial(nn.Conv2d, bias=False)
        outputs = channels * WIDENING if bottleneck else channels
        if bottleneck:
            convolutions = [
                convolution(inputs, channels, 1),
                convolution(channels, channels, 3, stride, 1),
                convolution(channels, outputs, 1),
            ]
        else:
            convolutions = [convolution(inputs, channels, 3, stride, 1), convolution(channels, outputs, 3, 1, 1)]
        steps: list[nn.Module] = []
        for each in convolutions:
            steps += [each, nn.BatchNorm2d(each.out_channels), nn.ReLU(inplace=True)]
        self.branch = nn.Sequential(*steps[:-1])
        nn.init.zeros_(steps[-2].weight)  # type: ignore[arg-type]  # the last norm: each block begins as the identity
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


def resnet(depth: int, classes: int, width: int = 64) -> nn.Sequential:
    """Images ``(n, 3, height, width)`` to scores ``(n, classes)``; ``width`` channels in the first stage, 64 as published."""
    counts, bottleneck = DEPTHS[depth]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    inputs = width
    for stage, count in enumerate(counts):
        channels = width << stage
        for number in range(count):
            layers.append(Block(inputs, channels, 2 if stage and not number else 1, bottleneck))
            inputs = channels * WIDENING if bottleneck else channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
