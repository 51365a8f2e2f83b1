# SPDX-License-Identifier: Apache-2.0
"""A user's script in which one worker goes wrong at one step, in one of many ways. Run by tests/chaos/trials.py.

    unisono run faulty_training.py --workers 4 -- FAULT WORKER STEP LOOP LOADERS JITTER

LOOP is trainer or attach, LOADERS the number of loader processes, JITTER by how many times a microbatch may take
longer than usual. Each place where something goes wrong carries a comment ``FAULT``, by which the tests find its line.
"""

import ctypes
import mmap
import os
import random
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
WHO, STEP, LOADERS = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
JITTER, STEPS = float(sys.argv[6]), int(sys.argv[7])
BATCH, WORKERS, USUAL_S = 8, 4, 0.01
BAD_SAMPLE = (STEP - 1) * BATCH + WHO * (BATCH // WORKERS)  # unshuffled, so it belongs to that worker's part of the step

me = current().worker
done = 0  # steps
noise = random.Random(f"{FAULT} {WHO} {STEP} {me}")


def is_due(*faults):
    return FAULT in faults and me == WHO and done + 1 == STEP


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if me == WHO and index == BAD_SAMPLE and FAULT.startswith("read"):
            decode(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 4


def decode(index):
    if FAULT == "read-endless":
        while True:  # FAULT read-endless
            index += 1
    if FAULT == "read-raises":
        raise ValueError(f"sample {index} has no end marker")  # FAULT read-raises


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        hidden = self.first(inputs)  # FAULT shape
        return self.second(torch.relu(hidden))


def objective(model, batch):
    time.sleep(USUAL_S * noise.uniform(1.0, JITTER))
    inputs, targets = batch
    if is_due("shape"):
        inputs = inputs[:, :5]
    if is_due("stop"):
        wait_for_the_disk()
    if is_due("segfault"):
        call_native_code()
    if is_due("memory-python", "memory-torch"):
        resource.setrlimit(resource.RLIMIT_AS, (memory_in_use() + (64 << 20), resource.RLIM_INFINITY))
        keep_everything()
    if is_due("memory-group"):
        fill_the_group()
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    if is_due("nan"):
        loss = loss / (outputs.sum() * 0.0).sqrt() * 0.0  # FAULT nan
    return loss


def wait_for_the_disk():
    time.sleep(0.8)  # long enough to be seen here by a heartbeat
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
    """Of the control group that was made for this: more than it may hold, so that the kernel kills us."""
    group = Path(os.environ["UNISONO_TRIAL_GROUP"])
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard = mmap.mmap(-1, 1 << 30)
    time.sleep(0.8)  # long enough to be seen here by a heartbeat
    for page in range(0, 1 << 30, mmap.PAGESIZE):
        hoard[page] = 1  # FAULT memory-group


class Count(unisono.Callback):
    def on_step(self, info):
        global done
        done = info.step


def train_with_trainer(model, optimizer):
    data = unisono.Data(Samples(), shuffle=False, loader_processes=LOADERS)
    unisono.Trainer(
        model, optimizer, objective=objective, data=data, batch_size=BATCH, max_steps=STEPS, callbacks=[Count()]
    ).fit()


def train_by_hand(model, optimizer):
    global done
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH, num_workers=LOADERS)
    run, batches = unisono.attach(model, optimizer, loader)
    while done < STEPS:
        for batch in batches:  # FAULT skip-backward
            if is_due("skip-backward"):
                continue
            loss = objective(model, batch)
            run.backward(loss)  # FAULT skip-rest
            if is_due("skip-step"):
                continue  # to the loop's head, FAULT skip-backward
            if run.step():
                done += 1
            if done >= STEPS or is_due("skip-rest"):
                break
        if is_due("skip-rest"):
            run.finish()  # FAULT skip-rest
    run.finish()


if __name__ == "__main__":
    torch.manual_seed(1)
    net = Net()
    {"trainer": train_with_trainer, "attach": train_by_hand}[LOOP](net, torch.optim.SGD(net.parameters(), lr=0.01))
