# SPDX-License-Identifier: Apache-2.0
"""A peer: DistributedDataParallel under Ray Train's TorchTrainer with a checkpoint every 20 steps, never giving up.

A death ends the worker group; Ray starts a new one, which loads the last checkpoint that was reported. This script is
the driver and brings its own local cluster. Started by recovery.py; measures nothing itself.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from recovery_log import StepLog
from workload_recovery_model import CHECKPOINT_EVERY, WORKERS, Share, build, loss_of, parser_of_options


def report(step: int, rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Called by every rank, as Ray asks; rank 0 brings the file."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder) / "checkpoint.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def load(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train(settings: dict[str, Any]) -> None:
    rank, workers = dist.get_rank(), dist.get_world_size()
    net, optimizer = build()
    done = load(net, optimizer)
    group = torch.tensor(os.getpid())
    dist.broadcast(group, 0)  # all of them are new processes after a death, so rank 0's id names the group
    model = prepare_model(net)
    share, log = Share(rank), StepLog(Path(settings["out"]), rank)
    for step in range(done + 1, settings["steps"] + 1):
        inputs, targets = share[step]
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        log.finished(step, int(group), workers)
        if step % CHECKPOINT_EVERY == 0:
            report(step, rank, net, optimizer)


def main() -> None:
    options = parser_of_options().parse_args()
    # One CPU more than workers: the cores are shared anyway, and nothing waits for a place.
    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(options.out.resolve()),
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "out": str(options.out)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            storage_path=str(options.out / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
