# SPDX-License-Identifier: Apache-2.0
"""The model, the data and the record that all sides of bench/checkpoint.py share: one definition, the same work.

Forty square layers: width 1,600 makes 102 million parameters, width 512 ten million. Everything is made from fixed
seeds. Imported by the workload scripts; measures nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LAYERS, BATCH, LEARNING_RATE = 40, 8, 1e-4


def build(width: int, frozen: float) -> nn.Sequential:
    """`frozen` is the share of the layers, the first ones, that are not trained."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(LAYERS):
        layer = nn.Linear(width, width, bias=False)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # else forty layers down nothing is left to learn
        layer.weight.requires_grad_(number >= round(frozen * LAYERS))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def data(width: int, steps: int) -> TensorDataset:
    """One epoch of `steps` full batches."""
    dice = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(steps * BATCH, width, generator=dice) for _ in range(2)))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


@dataclass
class Saved:
    """One save: after which step, how long the call kept the loop, when the checkpoint existed, how large it is."""

    step: int
    blocked_s: float
    done_s: float = 0.0  # time.time()
    bytes: int = 0
    bytes_written: int = 0


@dataclass
class Record:
    """What a workload measured, as one JSON file for the driver."""

    finished_s: list[float] = field(default_factory=list)  # time.time() after each step
    saves: list[Saved] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser()
    options.add_argument("--width", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--frozen", type=float, default=0.0, help="share of the layers that are not trained")
    options.add_argument("--out", type=Path, required=True, help="the first worker writes its record here")
    return options
