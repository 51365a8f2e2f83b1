# SPDX-License-Identifier: Apache-2.0
"""A contestant: torchft's DiLoCo, one replica group on each host, put together as its example train_diloco.py is.

Started by slow_network.py with the Python of an environment that has torchft; measures nothing itself.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo

from workload_slow_model import (
    OUTER_MOMENTUM,
    OUTER_RATE,
    WORKERS,
    Record,
    Share,
    build,
    inner_optimizer,
    loss_of,
    meet,
    parser_of_options,
)

STORE_PORT = 29600


def main() -> None:
    parser = parser_of_options()
    parser.add_argument("--local-steps", type=int, required=True)
    parser.add_argument("--own-address", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    net = build()
    inner = inner_optimizer(net)
    outer = torch.optim.SGD(net.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    def load_state(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])

    store = TCPStore(options.own_address, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load_state,
        state_dict=lambda: {"model": net.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict()},
        min_replica_size=WORKERS,
        use_async_quorum=False,  # DiLoCo insists
        timeout=timedelta(seconds=90),
        replica_id=f"slow_{options.rank}",
        rank=0,
        world_size=1,
        store_addr=options.own_address,
        store_port=store.port,
        hostname=options.own_address,
        lighthouse_addr=f"http://{options.address}:29510",
        init_sync=False,  # all begin with the same weights
    )
    share, record = Share(options.data, options.rank), Record(options.out if options.rank == 0 else None, net)
    with DiLoCo(manager, [net], inner, outer, sync_every=options.local_steps, pin_memory=False, use_bucketization=True):
        meet(options.out, options.rank)
        record.start()  # the first quorum, of tenths of a second, is within
        for step in range(1, options.steps + 1):
            inputs, targets = share[step]
            inner.zero_grad()
            loss_of(net(inputs), targets).backward()
            inner.step()
            if step % options.local_steps == 0:
                record.keep(step)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
