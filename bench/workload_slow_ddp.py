# SPDX-License-Identifier: Apache-2.0
"""A contestant: DistributedDataParallel on gloo, plain or with one of the gradient hooks that come with torch.

Started by slow_network.py, once on each host; measures nothing itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from workload_slow_model import WORKERS, Record, Share, build, inner_optimizer, loss_of, parser_of_options

PORT = 29500
ONE_BUCKET_MB = 1000.0  # PowerSGD hangs or fails on gloo with several


def main() -> None:
    parser = parser_of_options()
    parser.add_argument("--hook", choices=["none", "fp16", "powersgd"], default="none")
    parser.add_argument("--powersgd-rank", type=int, default=4)
    parser.add_argument("--powersgd-start", type=int, default=10, help="uncompressed steps before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    address = f"tcp://{options.address}:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=options.rank, world_size=WORKERS)
    net = build()
    model = (
        DistributedDataParallel(net, bucket_cap_mb=ONE_BUCKET_MB)
        if options.hook == "powersgd"
        else DistributedDataParallel(net)
    )
    if options.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.hook == "powersgd":
        state = powersgd.PowerSGDState(
            None, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=options.powersgd_start
        )
        model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = inner_optimizer(net)
    share, record = Share(options.data, options.rank), Record(options.out if options.rank == 0 else None, net)
    dist.barrier()
    record.start()
    for step in range(1, options.steps + 1):
        inputs, targets = share[step]
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        if step % options.every == 0:
            record.keep(step)
    dist.barrier()  # leaving right after a collective aborts now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
