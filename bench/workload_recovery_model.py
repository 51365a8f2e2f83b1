# SPDX-License-Identifier: Apache-2.0
"""The work of every recovery workload: the digit network of the other benchmarks on a small batch, one definition.

1.2 million parameters, AdamW, `BATCH` images a step over `WORKERS` workers; the data is made from a seed, small enough
that making it again after a restart costs nothing. Imported by the workload scripts in each peer's environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from models import LEARNING_RATE, DigitNet, images

WORKERS = 4
BATCH = 32  # images of one step, over all workers
SAMPLES = 4096
CHECKPOINT_EVERY = 20  # steps, for the peers that go back to a checkpoint


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True, help="end after this step")
    parser.add_argument("--out", type=Path, required=True, help="folder for the step log and the checkpoint")
    return parser


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DigitNet()
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def data() -> TensorDataset:
    return images(SAMPLES)


class Share:
    """This rank's part of the batch of any step; step 1 is the first."""

    def __init__(self, rank: int, workers: int = WORKERS) -> None:
        self.inputs, self.targets = data().tensors
        self.size = BATCH // workers
        self.offset = rank * self.size

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        first = ((step - 1) * BATCH + self.offset) % SAMPLES
        return self.inputs[first : first + self.size], self.targets[first : first + self.size]
