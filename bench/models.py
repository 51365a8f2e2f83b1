# SPDX-License-Identifier: Apache-2.0
"""The models and the data that both sides of a benchmark train: one definition, so that the work is the same.

`WORKLOADS` maps a name to a model, its loss, its synthetic data and its global batch. Everything is made from fixed
seeds, alike in every process, and nothing is downloaded. Imported by the two workload scripts; measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from reference_models.resnet import ResNet

LEARNING_RATE = 1e-3
DATA_SEED = 20260101


class DigitNet(nn.Module):
    """The classic MNIST network: two convolutions, dropout, two linear layers, 1.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.drop1 = nn.Dropout(0.25)
        self.linear1 = nn.Linear(9216, 128)
        self.drop2 = nn.Dropout(0.5)
        self.linear2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:  # (n, 1, 28, 28) -> (n, 10)
        x = functional.relu(self.conv1(images))  # (n, 32, 26, 26)
        x = functional.relu(self.conv2(x))  # (n, 64, 24, 24)
        x = self.drop1(functional.max_pool2d(x, 2)).flatten(1)  # (n, 9216)
        logits: Tensor = self.linear2(self.drop2(functional.relu(self.linear1(x))))
        return logits


@dataclass(frozen=True)
class DecoderShape:
    """8 layers of width 512 are 25.3 million parameters, nearly all of them in the blocks."""

    vocabulary: int = 256
    length: int = 64
    width: int = 512
    layers: int = 8
    heads: int = 8


class Block(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, width) -> (n, t, width)
        n, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, heads, t, width / heads)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(n, t, width))
        out: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """A decoder-only transformer over bytes with tied embeddings and no dropout."""

    def __init__(self, shape: DecoderShape | None = None) -> None:
        super().__init__()
        shape = shape or DecoderShape()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (n, t) -> (n, t, vocabulary)
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def images(samples: int) -> TensorDataset:
    """Noise in the shape of MNIST with random labels."""
    rng = np.random.default_rng(DATA_SEED)
    pixels = rng.standard_normal((samples, 1, 28, 28), dtype=np.float32)
    return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(rng.integers(0, 10, samples)))


def photographs(samples: int) -> TensorDataset:
    """Noise in the shape of CIFAR-10 with random labels."""
    rng = np.random.default_rng(DATA_SEED)
    pixels = rng.standard_normal((samples, 3, 32, 32), dtype=np.float32)
    return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(rng.integers(0, 10, samples)))


def resnet() -> nn.Module:
    """18 layers, 11.2 million parameters, batch norm; each side takes the statistics of what a worker sees."""
    return ResNet(18, classes=10, small_images=True)


def sequences(samples: int) -> TensorDataset:
    """Random bytes and, as targets, the same bytes one place on."""
    rng = np.random.default_rng(DATA_SEED)
    text = torch.from_numpy(rng.integers(0, DecoderShape.vocabulary, (samples, DecoderShape.length + 1)))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def points(samples: int) -> TensorDataset:
    rng = np.random.default_rng(DATA_SEED)
    inputs = torch.from_numpy(rng.standard_normal((samples, 16), dtype=np.float32))
    return TensorDataset(inputs, torch.from_numpy(rng.integers(0, 2, samples)))


def tiny() -> nn.Module:
    """Small enough that starting up is all there is to measure."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Workload:
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    samples: Callable[[int], TensorDataset]
    batch_size: int  # of one optimizer step, over all workers

    def data(self, steps: int) -> TensorDataset:
        """Exactly one epoch of `steps` full steps."""
        return self.samples(steps * self.batch_size)


WORKLOADS = {
    "cnn": Workload(DigitNet, functional.cross_entropy, images, 128),
    "decoder": Workload(Decoder, token_loss, sequences, 16),
    "resnet": Workload(resnet, functional.cross_entropy, photographs, 32),
    "tiny": Workload(tiny, functional.cross_entropy, points, 16),
}
