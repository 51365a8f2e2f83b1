# SPDX-License-Identifier: Apache-2.0
"""Everyone is killed, again and again; the same command goes on, on another number of workers, as if nothing had been.

Same samples, same loss of every step, same final hash as the run that nobody disturbed; every step once in the record.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from multiproc.running import Started, run_unisono, start_unisono
from multiproc.streamed import BATCH, SAMPLES, write_shards
from unisono.core import events
from unisono.core.run_dir import RunDir

# Dropout, augmentation, momentum, a schedule, batch norm, and a callback with state of its own. `tally`, a parameter
# that SGD with a learning rate of the batch size takes one off for every time, counts how often each sample was learnt
# from. "processes" says how many loader processes this life of the run has, "pace" how long a step takes at least.
SCRIPT = f"""
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.data import Shards

STYLE, STEPS = sys.argv[1], int(sys.argv[2])


def number(name):
    try:
        return float(Path(name).read_text())
    except (OSError, ValueError):
        return 0.0


def noisy(sample):
    inputs, label, number = sample
    return inputs + 0.1 * torch.randn(8), label, number


class InMemory(torch.utils.data.Dataset):
    def __init__(self, shards):
        self.samples = [shards[i] for i in range(len(shards))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return noisy(self.samples[index])


class Seen(unisono.Callback):
    '''A sum in which the order counts.'''

    def __init__(self):
        self.sum = 0.0

    def on_step(self, info):
        self.sum = (self.sum * 31 + info.loss) % 1e6
        time.sleep(number("pace"))

    def state_dict(self):
        return {{"sum": self.sum}}

    def load_state_dict(self, state):
        self.sum = state["sum"]

    def on_end(self, result):
        Path("seen").write_text(repr(self.sum))


class Tallied(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.tally = net, nn.Parameter(torch.zeros({SAMPLES}))


def objective(model, batch):
    inputs, labels, ids = batch
    seen = model.tally[ids].mean()
    return nn.functional.cross_entropy(model.net(inputs), labels) + (seen - seen.detach())


def shards(transform=None):
    return Shards("../data", cache="cache", columns=("inputs", "label", "number"), transform=transform)


torch.manual_seed(2)
model = Tallied(
    nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
)
groups = [{{"params": model.net.parameters(), "momentum": 0.9}}, {{"params": [model.tally], "lr": {BATCH}.0}}]
optimizer = torch.optim.SGD(groups, lr=0.05)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0 - step / STEPS / 2, lambda step: 1.0])
data = unisono.Data(
    shards(noisy) if STYLE == "streamed" else InMemory(shards()),
    shuffle="blocks" if STYLE == "streamed" else True, block_shards=4, loader_processes=int(number("processes")),
)
unisono.Trainer(
    model, optimizer, objective=objective, data=data, batch_size={BATCH}, max_steps=STEPS, schedule=schedule,
    callbacks=[Seen()],
).fit()
"""
STEPS, PER_EPOCH, SAVED_EVERY = 500, SAMPLES // BATCH, 9
WORKERS, PROCESSES = (4, 2, 3, 1, 4, 2), (0, 2, 0, 2, 2, 0)  # of each life; five end with a kill


def steps_in(folder: Path) -> list[events.StepFinished]:
    found = events.read(RunDir(folder / "runs" / "r").events)
    return [event for event in found if isinstance(event, events.StepFinished)]


def until_step(started: Started, folder: Path, step: int) -> None:
    started.until(lambda: (RunDir(folder / "runs" / "r").events).exists() and len(steps_in(folder)) >= step, "it", 90)


def moments(seed: int) -> list[int]:
    """Five random steps, two of them in one epoch."""
    dice = random.Random(seed)
    epochs = sorted(dice.sample(range(2, STEPS // PER_EPOCH - 1), 4))
    kills = [epoch * PER_EPOCH + dice.randrange(2, 5) for epoch in epochs]
    return sorted([*kills, kills[1] + dice.randrange(5, PER_EPOCH - 5)])


@pytest.mark.parametrize("style", ["map-style", "streamed"])
def test_a_run_that_is_killed_five_times_ends_with_the_bits_of_one_that_was_not(style: str, tmp_path: Path) -> None:
    calm_folder, folder = tmp_path / "calm", tmp_path / "killed"
    calm_folder.mkdir()
    folder.mkdir()
    write_shards(tmp_path / "data", "zstd")
    behind = (style, str(STEPS))
    calm = run_unisono(SCRIPT, calm_folder, "--microbatches", "4", workers=1, script_args=behind)
    kills = moments(len(style))
    options = ("--microbatches", "4", "--name", "r", "--checkpoint-every", str(SAVED_EVERY))
    for workers, processes, step in zip(WORKERS, PROCESSES, kills, strict=False):
        (folder / "processes").write_text(str(processes))
        (folder / "pace").write_text("0.0" if step - len(steps_in(folder)) > 40 else "0.01")
        with start_unisono(SCRIPT, folder, *options, workers=workers, script_args=behind) as started:
            until_step(started, folder, step)
            started.send(signal.SIGKILL)
            started.wait(expect=-signal.SIGKILL)
    (folder / "pace").unlink()
    (folder / "processes").write_text(str(PROCESSES[-1]))
    finished = run_unisono(SCRIPT, folder, *options, workers=WORKERS[-1], script_args=behind)
    assert finished.weights_sha256 == calm.weights_sha256
    steps = steps_in(folder)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    undisturbed = [event for event in calm.events if isinstance(event, events.StepFinished)]
    assert [step.loss for step in steps] == [step.loss for step in undisturbed]
    assert [step.samples for step in steps] == [step.samples for step in undisturbed]
    assert [step.lr for step in steps] == [step.lr for step in undisturbed]
    assert (folder / "seen").read_text() == (calm_folder / "seen").read_text()
    resumed = [event.step for event in events.read(RunDir(folder / "runs" / "r").events) if event.kind == "resumed"]
    assert len(resumed) == len(kills)
    assert resumed == sorted(resumed)
    assert all(at >= kill - 2 * SAVED_EVERY for at, kill in zip(resumed, kills, strict=True)), "from an old checkpoint"
    assert finished.run_dir is not None
    learnt = -load_file(RunDir(finished.run_dir).weights)["tally"]
    assert learnt.sum() == STEPS * BATCH
    assert set(np.unique(learnt)) == {STEPS // PER_EPOCH, STEPS // PER_EPOCH + 1}, "a sample twice, or not at all"
