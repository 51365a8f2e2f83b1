# SPDX-License-Identifier: Apache-2.0
"""Everyone is killed, again and again; the same command goes on, on another number of workers, as if nothing had been.

Same samples, same loss of every step, same final hash as the run that nobody disturbed; every step once in the record.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from multiproc.running import Started, run_unisono, start_unisono
from unisono.core import events
from unisono.core.run_dir import RunDir

# Dropout, augmentation, momentum, a schedule, batch norm, loader processes, and a callback with state of its own. The
# ids that each microbatch reads are written down, so that a sample that is read under the wrong number shows.
SCRIPT = """
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

PROCESSES, STEPS = int(sys.argv[1]), int(sys.argv[2])


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(200, 8, generator=generator)
        self.labels = torch.randint(0, 4, (200,), generator=generator)

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), self.labels[index], index


class Seen(unisono.Callback):
    '''Adds up the ids of the steps; a wrong order or a sample twice gives another sum.'''

    def __init__(self):
        self.sum = 0.0

    def on_step(self, info):
        self.sum = (self.sum * 31 + info.loss) % 1e6
        try:
            time.sleep(float(Path("pace").read_text()))
        except (OSError, ValueError):
            pass

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, state):
        self.sum = state["sum"]

    def on_end(self, result):
        Path("seen").write_text(repr(self.sum))


def objective(model, batch):
    inputs, labels, ids = batch
    return nn.functional.cross_entropy(model(inputs), labels) + 0.0 * ids.sum()


torch.manual_seed(2)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)
data = unisono.Data(Noisy(), loader_processes=PROCESSES)
unisono.Trainer(
    model, optimizer, objective=objective, data=data, batch_size=16, max_steps=STEPS, schedule=schedule,
    callbacks=[Seen()],
).fit()
"""
WORKERS = (4, 2, 3, 1, 4)


def steps_in(folder: Path) -> list[events.StepFinished]:
    found = events.read(RunDir(folder / "runs" / "r").events)
    return [event for event in found if isinstance(event, events.StepFinished)]


def until_step(started: Started, folder: Path, step: int) -> None:
    started.until(lambda: (RunDir(folder / "runs" / "r").events).exists() and len(steps_in(folder)) >= step, "it", 90)


@pytest.mark.parametrize(("processes", "deaths"), [(0, 5), (2, 2)])
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_was_not(
    processes: int, deaths: int, tmp_path: Path
) -> None:
    calm_folder, folder = tmp_path / "calm", tmp_path / "killed"
    calm_folder.mkdir()
    folder.mkdir()
    total = 120
    behind = (str(processes), str(total))
    calm = run_unisono(SCRIPT, calm_folder, "--microbatches", "4", workers=1, script_args=behind)
    rng = random.Random(500 + processes)
    kills = sorted(rng.sample(range(5, total - 10), deaths))
    (folder / "pace").write_text("0.01")
    options = ("--microbatches", "4", "--name", "r", "--checkpoint-every", "9")
    for workers, step in zip(WORKERS, kills, strict=False):
        with start_unisono(SCRIPT, folder, *options, workers=workers, script_args=behind) as started:
            until_step(started, folder, step)
            started.send(signal.SIGKILL)
            started.wait(expect=-signal.SIGKILL)
    (folder / "pace").unlink()
    finished = run_unisono(SCRIPT, folder, *options, workers=4, script_args=behind)
    assert finished.weights_sha256 == calm.weights_sha256
    steps = steps_in(folder)
    assert [step.step for step in steps] == list(range(1, total + 1))
    undisturbed = [event for event in calm.events if isinstance(event, events.StepFinished)]
    assert [step.loss for step in steps] == [step.loss for step in undisturbed]
    assert [step.samples for step in steps] == [step.samples for step in undisturbed]
    assert [step.lr for step in steps] == [step.lr for step in undisturbed]
    assert (folder / "seen").read_text() == (calm_folder / "seen").read_text()
    resumed = [event.step for event in events.read(RunDir(folder / "runs" / "r").events) if event.kind == "resumed"]
    assert resumed == sorted(resumed)
    assert resumed[-1] >= kills[-1] - 20, "it went on from an old checkpoint"
