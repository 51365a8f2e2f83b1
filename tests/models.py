# SPDX-License-Identifier: Apache-2.0
"""The four models that exactness is shown on, each with its data, loss and optimizer. Small and quick.

Used by the contract tests (as objects) and by `multiproc/train_model.py` (as a script on real workers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class DigitNet(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(8 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm1(self.conv1(x)).relu(), 2)
        x = nn.functional.max_pool2d(self.norm2(self.conv2(x)).relu(), 2)
        return self.out(self.dropout(x.flatten(1)))


class TinyDecoder(nn.Module):
    """A transformer language model whose output layer is its embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 32, length: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (n, t) -> (n, vocabulary, t)
        mask = self.mask.to(self.position.dtype)
        return self.head(self.blocks(self.embed(tokens) + self.position, mask=mask)).transpose(1, 2)


class SequenceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


@dataclass
class Case:
    model: Callable[[], nn.Module]
    data: Dataset[Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    epochs: int = 2
    options: Callable[[torch.optim.Optimizer], dict[str, Any]] = lambda _: {}
    dropout_free: Callable[[], nn.Module] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _labels(count: int, classes: int, *more: int, seed: int) -> Tensor:
    return torch.randint(classes, (count, *more), generator=torch.Generator().manual_seed(seed))


def cnn() -> Case:
    data = TensorDataset(_random(100, 1, 28, 28, seed=1), _labels(100, 10, seed=2))
    return Case(
        DigitNet,
        data,
        nn.functional.cross_entropy,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        batch_size=24,
        dropout_free=lambda: DigitNet(dropout=0.0),
    )


def lm() -> Case:
    text = _labels(90, 64, 17, seed=3)
    return Case(
        TinyDecoder,
        TensorDataset(text[:, :-1], text[:, 1:]),
        nn.functional.cross_entropy,
        lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3),
        batch_size=20,
        options=_clip_and_cosine,
        dropout_free=lambda: TinyDecoder(dropout=0.0),
    )


def _clip_and_cosine(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from unisono import Clip

    warm_up = 3
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / 10)))
    )
    return {"clip": Clip(norm=0.5), "schedule": schedule}


def lstm() -> Case:
    data = TensorDataset(_random(64, 9, 6, seed=4), _labels(64, 3, seed=5))
    return Case(
        SequenceNet,
        data,
        nn.functional.cross_entropy,
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        batch_size=16,
        dropout_free=SequenceNet,
    )


def mlp() -> Case:
    """Regression with 53 samples in batches of 16: the last batch has 5, fewer than 8 microbatches."""
    inputs = _random(53, 7, seed=6)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 1))

    return Case(
        build,
        data,
        nn.functional.mse_loss,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=1e-3),
        batch_size=16,
        epochs=3,
        dropout_free=build,
    )


CASES: dict[str, Callable[[], Case]] = {"cnn": cnn, "lm": lm, "lstm": lstm, "mlp": mlp}
