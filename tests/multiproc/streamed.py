# SPDX-License-Identifier: Apache-2.0
"""A small training on shards for tests of streaming, and the verdict that only its weights can give.

`write_shards` makes the data, `script` the training that reads it as asked. `tally`, a parameter, counts how often
each sample was learnt from: SGD with a learning rate of the batch size takes one off for every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from multiproc.running import Finished
from unisono.core.run_dir import RunDir
from unisono.data import Shards, ShardWriter

SAMPLES, BATCH, EPOCHS, SHARDS = 240, 16, 2, 24
STEPS = SAMPLES // BATCH * EPOCHS

# `pace` says how many seconds a microbatch takes; no such file, no waiting.
_SCRIPT = f"""
import time
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.data import BadSample, Shards

SAMPLES, BATCH, EPOCHS = {SAMPLES}, {BATCH}, {EPOCHS}


class Tallied(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.tally = net, nn.Parameter(torch.zeros(SAMPLES))


def objective(model, batch):
    try:
        time.sleep(float(Path("pace").read_text()))
    except (OSError, ValueError):
        pass
    inputs, labels, ids = batch
    seen = model.tally[ids].mean()
    return nn.functional.cross_entropy(model.net(inputs), labels) + (seen - seen.detach())


def prepare(sample):
    inputs, label, number = sample
    if number in SETTINGS["bad"]:
        raise BadSample(f"number {{number}} is no good")
    return inputs + 0.1 * torch.randn(8), label, number


torch.manual_seed(2)
model = Tallied(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)))
groups = [{{"params": model.net.parameters(), "momentum": 0.9}}, {{"params": [model.tally], "lr": float(BATCH)}}]
optimizer = torch.optim.SGD(groups, lr=0.05)
shards = Shards(
    SETTINGS["url"], cache=SETTINGS["cache"], cache_limit=SETTINGS["limit"], columns=("inputs", "label", "number"),
    transform=prepare if SETTINGS["augment"] else None,
)
data = unisono.Data(
    shards, shuffle=SETTINGS["shuffle"], block_shards=4, loader_processes=SETTINGS["processes"],
    on_bad=SETTINGS["on_bad"],
)
unisono.Trainer(
    model, optimizer, objective=objective, data=data, batch_size=BATCH, epochs=EPOCHS,
    eval_data=data if SETTINGS["evaluate"] else None,
).fit()
"""
_SETTINGS = {
    "limit": "1GB",
    "shuffle": "blocks",
    "augment": True,
    "processes": 0,
    "on_bad": "stop",
    "bad": (),
    "evaluate": False,
}


def script(url: str | Path, cache: Path, **settings: Any) -> str:
    """The training, as a script's text; settings are named as in `_SETTINGS`."""
    unknown = settings.keys() - _SETTINGS.keys()
    assert not unknown, unknown
    return f"SETTINGS = {_SETTINGS | settings | {'url': str(url), 'cache': str(cache)}!r}\n{_SCRIPT}"


def write_shards(dest: str | Path, compression: str | None = None) -> None:
    """240 samples in 24 shards."""
    dice = np.random.default_rng(7)
    inputs = dice.standard_normal((SAMPLES, 8), dtype=np.float32)
    labels = dice.integers(0, 4, SAMPLES)
    columns = {"inputs": "float32[8]", "label": "int", "number": "int"}
    with ShardWriter(dest, columns, shard_bytes=720, compression=compression) as writer:
        for number in range(SAMPLES):
            writer.write({"inputs": inputs[number], "label": int(labels[number]), "number": number})
    assert writer.index is not None
    assert len(writer.index.shards) == SHARDS


def shard_bytes(url: str | Path) -> int:
    """Of the largest, as it lies in a cache."""
    return max(entry.raw_bytes for entry in Shards(url).index.shards)


def check_tally(finished: Finished, times: Mapping[int, int] | None = None) -> None:
    """Every sample was learnt from once an epoch; those in `times` so often."""
    assert finished.run_dir is not None
    learnt = load_file(RunDir(finished.run_dir).weights)["tally"]
    expected = np.ones(SAMPLES)
    for number, often in (times or {}).items():
        expected[number] = often
    wrong = np.flatnonzero(learnt != -EPOCHS * expected).tolist()
    assert not wrong, f"samples {wrong} were learnt from {(-learnt[wrong]).tolist()} times in {EPOCHS} epochs"
