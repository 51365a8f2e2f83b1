# SPDX-License-Identifier: Apache-2.0
"""A peer: DistributedDataParallel under torchrun, written to survive a restart as its documentation says.

Rank 0 saves a checkpoint every 20 steps, complete or not at all; whoever starts loads the last one. A death ends all
workers and torchrun starts all of them again. Started by recovery.py; measures nothing itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recovery_log import StepLog
from workload_recovery_model import CHECKPOINT_EVERY, Share, build, loss_of, parser_of_options


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps done; 0 without a checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    options = parser_of_options().parse_args()
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    group = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net, optimizer = build()
    checkpoint = options.out / "checkpoint.pt"
    done = load(checkpoint, net, optimizer)
    model = DistributedDataParallel(net)
    share, log = Share(rank), StepLog(options.out, rank)
    for step in range(done + 1, options.steps + 1):
        inputs, targets = share[step]
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        log.finished(step, group, workers)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(checkpoint, step, net, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
