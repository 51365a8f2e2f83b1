# SPDX-License-Identifier: Apache-2.0
"""The peer: a workload under torchrun with DistributedDataParallel, written as a careful PyTorch user would.

torchrun --standalone --nproc-per-node 2 bench/workload_ddp.py --workload cnn --steps 20

Rank 0 prints one JSON line with the seconds of every measured step. Started by the drivers; compares nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from measure import peak_rss_bytes, step_seconds
from models import LEARNING_RATE, WORKLOADS, Workload


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, required=True, help="measured steps")
    parser.add_argument("--warmup", type=int, default=0, help="steps before the measured ones")
    parser.add_argument("--bucket-view", action="store_true", help="gradient_as_bucket_view=True")
    parser.add_argument("--first-step", type=Path, help="write the time of the first finished step here")
    return parser.parse_args()


def train(options: argparse.Namespace, workload: Workload) -> dict[str, object]:
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = workload.build()
    model = DistributedDataParallel(net, gradient_as_bucket_view=options.bucket_view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(1 + rank)  # dropout differs between the ranks

    data = workload.data(options.warmup + options.steps)
    sampler: DistributedSampler[object] = DistributedSampler(data, workers, rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=workload.batch_size // workers, sampler=sampler)
    sampler.set_epoch(0)

    model.train()
    finished_s: list[float] = []
    data_s = 0.0  # inside the loader, over all steps
    asked_s = time.perf_counter()
    for inputs, targets in loader:
        data_s += time.perf_counter() - asked_s
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        asked_s = time.perf_counter()
        finished_s.append(asked_s)
        if options.first_step and rank == 0 and len(finished_s) == 1:
            options.first_step.write_text(repr(time.time()))

    peak = torch.tensor(peak_rss_bytes())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {
        "step_s": step_seconds(finished_s, options.warmup),
        "data_s_per_step": data_s / len(finished_s),
        "steps": len(finished_s),
        "loss": loss.item(),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "peak_rss_bytes": int(peak),
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = train(options, WORKLOADS[options.workload])
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        # Leaving right after a collective aborts now and then: a gloo thread still holds a tensor of it at exit.
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
