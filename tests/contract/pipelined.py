# SPDX-License-Identifier: Apache-2.0
"""Models and trainings that the tests of pipelines share: the same steps in one process and over several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 11, 8, 5


class Embed(nn.Module):
    """Two parts of the model in one layer."""

    def __init__(self, words: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.words, self.places = words, places

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dropout(self.down(functional.gelu(self.up(self.second_norm(x)))))


class Decoder(nn.Module):
    """embed -> blocks -> norm -> head; `tied`: the head is the embedding."""

    def __init__(self, blocks: int = 6, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embed", Embed(self.words, self.places)), *blocks, ("norm", self.norm), ("head", self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        value = tokens
        for _, layer in self.pipeline_layers():
            value = layer(value)
        return value


def decoder(**options: Any) -> Decoder:
    """In float64, with the same weights wherever it is made."""
    torch.manual_seed(1)
    return Decoder(**options).double()


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(WORDS, (samples, LENGTH + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


Run = Callable[[Tensor, Tensor, float], Tensor]


SIZES = [8] * 19 + [3]  # ten steps of two microbatches, the last one short


def train(parameters: Sequence[nn.Parameter], run: Run, sizes: Sequence[int] = SIZES) -> list[float]:
    """A step for each two microbatches, weighted by samples; the last may be short. The losses of all microbatches."""
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    losses = []
    for step in range(0, len(sizes), 2):
        pair = sizes[step : step + 2]
        optimizer.zero_grad()
        for place, samples in enumerate(pair):
            torch.manual_seed(1000 + step + place)
            losses.append(float(run(*batch(step + place, samples), samples / sum(pair))))
        optimizer.step()
    return losses


def alone(model: nn.Module, sizes: Sequence[int] = SIZES) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in one process."""
    model = copy.deepcopy(model)

    def run(tokens: Tensor, targets: Tensor, weight: float) -> Tensor:
        loss = mean_loss(model(tokens), targets)
        (loss * weight).backward()
        return loss.detach()

    losses = train(list(model.parameters()), run, sizes)
    return losses, model.state_dict()
