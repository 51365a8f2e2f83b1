# SPDX-License-Identifier: Apache-2.0
"""The beginnings of users' scripts that tests about failing share: a tiny training, and who runs it."""

SMALL = """
import os
import time
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.train.context import current

WORKER = current().worker if os.environ.get("UNISONO_RUN") else 0
torch.manual_seed(1)
DATA = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))


def fit(model=None, optimizer=torch.optim.SGD, **changes):
    model = model or nn.Linear(4, 2)
    asked = {"loss": nn.functional.cross_entropy, "data": DATA, "batch_size": 8, "max_steps": 4} | changes
    return unisono.Trainer(model, optimizer(model.parameters(), lr=0.1), **asked).fit()


class Every(unisono.Callback):
    '''Calls `action(step)` after every step, on every worker.'''

    def __init__(self, action):
        self.action = action

    def on_step(self, info):
        self.action(info.step)


"""

# Trains until told otherwise; once there is a file called "again", only for as many steps as it says.
ENDLESS = (
    SMALL
    + """
LONG = {
    "max_steps": int(Path("again").read_text()) if Path("again").exists() else 1_000_000,
    "callbacks": [Every(lambda step: time.sleep(0.01))],
}
"""
)
