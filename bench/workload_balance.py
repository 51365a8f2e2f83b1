# SPDX-License-Identifier: Apache-2.0
"""A training whose microbatches take a fixed time, for bench/balance.py: the machine's own cores play no part."""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import unisono

MICROBATCH_S = 0.006

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(2048, 32), torch.randint(0, 10, (2048,)))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
    time.sleep(MICROBATCH_S)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


unisono.Trainer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    objective=objective,
    data=data,
    batch_size=64,
    microbatches=16,
    max_steps=options.steps,
).fit()
