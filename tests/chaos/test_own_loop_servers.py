# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own with parameter servers: the bits of one process, also when workers and servers die on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import Finished, run_python, run_unisono
from unisono.core import events

# A schedule that hangs on run.step(), dropout, batch norm, clipping; 72 samples in batches of 16 leave 8 for the last.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

torch.manual_seed(1)
inputs = torch.randn(72, 5)
model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
run, loader = unisono.attach(
    model, optimizer, DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True),
    clip=unisono.Clip(norm=0.5), travels={"schedule": schedule},
)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model(x), y))
        if run.step():
            schedule.step()
model.eval()
run.finish(loss=nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).item())
"""
FOUR = {"UNISONO_MICROBATCHES": "4"}
ASKED = ("--microbatches", "4", "--strategy", "ps")
LOST = """
[[fault]]
worker = 1
step = 4
kind = "kill"
at = "forward"

[[fault]]
worker = 3
step = 8
kind = "kill"
at = "update"
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_python(SCRIPT, tmp_path_factory.mktemp("alone"), env=FOUR)


def test_a_loop_of_ones_own_comes_to_the_same_bits_with_servers_whoever_dies(alone: Finished, tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(LOST)
    lost = ("--servers", "2", "--copies", "2", "--faults", "faults.toml")
    for options in (("--servers", "1"), lost):
        finished = run_unisono(SCRIPT, tmp_path, *ASKED, *options, workers=2)
        assert finished.weights_sha256 == alone.weights_sha256, options
        assert finished.result is not None
        assert alone.result is not None
        assert finished.result["metrics"] == alone.result["metrics"]
    assert len(finished.events_of(events.FaultFired)) == 2, "the faults have happened"


def test_a_loop_of_ones_own_is_taken_up_again_without_servers(alone: Finished, tmp_path: Path) -> None:
    named = ("--microbatches", "4", "--name", "own")
    run_unisono(SCRIPT, tmp_path, *named, "--strategy", "ps", "--stop-after", "7", workers=2)
    resumed = run_unisono(SCRIPT, tmp_path, *named, workers=2)
    assert [event.step for event in resumed.events_of(events.Resumed)] == [7]
    assert resumed.weights_sha256 == alone.weights_sha256
