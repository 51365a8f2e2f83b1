# SPDX-License-Identifier: Apache-2.0
"""A contestant: hivemind.Optimizer over its own network of peers, synchronous or with local updates between averages.

Started by slow_network.py with the Python of an environment that has hivemind; measures nothing itself. Samples are
counted by hivemind, so that a round may hold some more than asked for.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import hivemind
import torch

from workload_slow_model import BATCH, LEARNING_RATE, WORKERS, Record, Share, build, loss_of, meet, parser_of_options

PORT = 29700
PATIENCE_S = 60.0


def first_peers(out: Path, rank: int, own: str) -> hivemind.DHT:
    """The first host begins the network; the others read its addresses from the shared disk."""
    there = out / "peers.json"
    deadline_s = time.monotonic() + PATIENCE_S
    while rank and not there.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the first peer never came up")
        time.sleep(0.05)
    known = json.loads(there.read_text()) if rank else []
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{own}/tcp/{PORT}"], initial_peers=known, start=True, use_auto_relay=False, use_relay=False
    )
    if rank == 0:
        part = out / "peers.part"
        part.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        part.rename(there)
    return dht


def main() -> None:
    parser = parser_of_options()
    parser.add_argument("--local-steps", type=int, required=True, help="1: gradients are averaged every step")
    parser.add_argument("--own-address", required=True)
    parser.add_argument("--matchmaking-s", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    net = build()
    dht = first_peers(options.out, options.rank, options.own_address)
    local = options.local_steps > 1
    half = hivemind.compression.Float16Compression()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="slow",
        batch_size_per_step=BATCH // WORKERS,
        target_batch_size=BATCH * options.local_steps,
        params=net.parameters(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        use_local_updates=local,
        delay_state_averaging=False,
        matchmaking_time=options.matchmaking_s,
        averaging_timeout=PATIENCE_S,
        grad_compression=half,
        state_averaging_compression=half,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
        averager_opts={"min_group_size": WORKERS, "target_group_size": WORKERS, "request_timeout": 0.5},
    )
    share, record = Share(options.data, options.rank), Record(options.out if options.rank == 0 else None, net)
    meet(options.out, options.rank)
    record.start()
    seen = 0
    for step in range(1, options.steps + 1):
        inputs, targets = share[step]
        optimizer.zero_grad()
        loss_of(net(inputs), targets).backward()
        optimizer.step()
        if optimizer.local_epoch > seen and (local or step % options.every == 0):
            seen = optimizer.local_epoch
            record.keep(step)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
