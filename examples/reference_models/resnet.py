"""A residual network for images (He et al. 2015), with 18 or 50 layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """`body` beside a short cut, which is a convolution where the shape changes."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.short_cut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short_cut(x))


def basic(inputs: int, channels: int, stride: int) -> Residual:
    body = nn.Sequential(_convolution(inputs, channels, 3, stride), nn.ReLU(), _convolution(channels, channels, 3))
    return Residual(body, inputs, channels, stride)


def bottleneck(inputs: int, channels: int, stride: int) -> Residual:
    body = nn.Sequential(
        _convolution(inputs, channels, 1),
        nn.ReLU(),
        _convolution(channels, channels, 3, stride),
        nn.ReLU(),
        _convolution(channels, 4 * channels, 1),
    )
    return Residual(body, inputs, 4 * channels, stride)


class ResNet(nn.Module):
    """`small_images`: a first layer for 32 x 32 pixels instead of 224 x 224."""

    def __init__(self, layers: int = 18, classes: int = 1000, small_images: bool = False) -> None:
        super().__init__()
        make, repeats, widening = {18: (basic, (2, 2, 2, 2), 1), 50: (bottleneck, (3, 4, 6, 3), 4)}[layers]
        first = [_convolution(3, 64, 3), nn.ReLU()]
        large = [_convolution(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
        self.embed = nn.Sequential(*(first if small_images else large))
        blocks, inputs = [], 64
        for stage, count in enumerate(repeats):
            for number in range(count):
                blocks.append(make(inputs, 64 << stage, stride=2 if stage and not number else 1))
                inputs = (64 << stage) * widening
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:  # (n, 3, height, width) -> (n, classes)
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))
