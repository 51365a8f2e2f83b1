# SPDX-License-Identifier: Apache-2.0
"""A user's script in which one worker goes wrong at one step, in one of many ways. Started by `trials`.

    unisono run faulty_training.py --workers 4 -- FAULT WORKER STEP LOOP LOADERS STEPS JITTER

LOOP is trainer or attach, LOADERS the number of loader processes; a microbatch takes between 1 and JITTER times its
usual time. A comment ``FAULT name`` marks the lines that a diagnosis of it may name.
"""

import ctypes
import mmap
import os
import random
import re
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.train.context import current

FAULT, LOOP = sys.argv[1], sys.argv[4]
WHO, STEP, LOADERS, STEPS = (int(sys.argv[i]) for i in (2, 3, 5, 6))
JITTER = float(sys.argv[7])
BATCH, PARTS, USUAL_S = 8, 4, 0.01
BAD_SAMPLE = (STEP - 1) * BATCH + WHO * (BATCH // PARTS)  # in order, so that worker reads it, for that step
LENGTH = (STEP - 1) * BATCH if FAULT == "skip-epoch" else 40_000  # an epoch that ends before the step, or never

me = current().worker
done = 0  # steps
noise = random.Random(me)


def is_due(*faults):
    return FAULT in faults and me == WHO and done + 1 == STEP


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if me == WHO and index == BAD_SAMPLE:
            decode(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 4


def decode(index):
    if FAULT == "read-endless":
        while True:  # FAULT read-endless
            index += 1  # FAULT read-endless
    if FAULT == "read-deaf":  # an endless loop in native code that keeps Python's lock: no thread of ours can run
        re.match("(a+)+b", "a" * 64)  # FAULT read-deaf
    if FAULT == "read-raises":
        raise ValueError(f"sample {index} has no end marker")  # FAULT read-raises


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        hidden = self.first(inputs)  # FAULT shape-inputs
        return self.second(torch.relu(hidden))


def objective(model, batch):
    time.sleep(USUAL_S * noise.uniform(1.0, JITTER))
    inputs, targets = batch
    if is_due("stop"):
        wait_for_the_disk()
    if is_due("segfault"):
        call_native_code()
    if is_due("memory-python", "memory-torch"):
        resource.setrlimit(resource.RLIMIT_AS, (memory_in_use() + (64 << 20), resource.RLIM_INFINITY))
        keep_everything()
    if is_due("memory-group"):
        fill_the_group()
    outputs = model(inputs[:, :5] if is_due("shape-inputs") else inputs)
    if is_due("shape-targets"):
        targets = targets[:1]
    loss = nn.functional.cross_entropy(outputs, targets)  # FAULT shape-targets
    if is_due("nan"):
        loss = torch.log(-loss)  # FAULT nan-trainer
    return loss


def wait_for_the_disk():
    time.sleep(1.2)  # FAULT stop: long enough to be seen here by a heartbeat
    os.kill(os.getpid(), signal.SIGSTOP)  # FAULT stop


def call_native_code():
    ctypes.string_at(0)  # FAULT segfault


def memory_in_use():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def keep_everything():
    if FAULT == "memory-python":
        return bytearray(1 << 30)  # FAULT memory-python
    return torch.ones(1 << 28)  # FAULT memory-torch


def fill_the_group():
    """More than the control group that was made for us may hold, so that the kernel kills us."""
    (Path(os.environ["TRIAL_GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
    hoard = mmap.mmap(-1, 1 << 30)
    time.sleep(1.2)  # FAULT memory-group: long enough to be seen here by a heartbeat
    for page in range(0, 1 << 30, mmap.PAGESIZE):
        hoard[page] = 1  # FAULT memory-group


def freeze_when_due():
    if is_due("shape-layer"):
        net.first.weight.requires_grad_(False)


class Count(unisono.Callback):
    def on_step(self, info):
        global done
        done = info.step
        freeze_when_due()


def train_with_trainer(model, optimizer):
    data = unisono.Data(Samples(), shuffle=False, loader_processes=LOADERS)
    trainer = unisono.Trainer(
        model, optimizer, objective=objective, data=data, batch_size=BATCH, max_steps=STEPS, callbacks=[Count()]
    )
    trainer.fit()  # FAULT shape-layer-trainer


def train_by_hand(model, optimizer):
    global done
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH, num_workers=LOADERS)
    run, batches = unisono.attach(model, optimizer, loader)
    while done < STEPS and not is_due("skip-rest", "skip-epoch"):
        for batch in batches:  # FAULT skip-backward, FAULT skip-step
            if is_due("skip-backward"):
                continue
            loss = objective(model, batch)
            run.backward(loss)  # FAULT nan-attach, FAULT shape-layer-attach
            if is_due("skip-step"):
                continue
            if run.step():
                done += 1
                freeze_when_due()
            if done >= STEPS or is_due("skip-rest"):
                break
    run.finish()  # FAULT skip-rest, FAULT skip-epoch


if __name__ == "__main__":
    torch.manual_seed(1)
    net = Net()
    {"trainer": train_with_trainer, "attach": train_by_hand}[LOOP](net, torch.optim.SGD(net.parameters(), lr=0.01))
