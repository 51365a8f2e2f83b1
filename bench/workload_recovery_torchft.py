# SPDX-License-Identifier: Apache-2.0
"""A peer: one replica group of one worker under torchft, put together as its documentation and its example do.

A dead replica costs the others the step they are in; they go on without it as soon as the lighthouse gives it up, and
it copies its state from one of them when it is back. Started by recovery.py, once for each replica; measures nothing.

torchft 0.2.0's own gradient hook cannot stand a failed all-reduce on gloo: it ends with an AssertionError, and with it
every survivor and the state they hold. `Repaired` is that hook without the assertion; --as-published goes without it.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft

from recovery_log import StepLog
from workload_recovery_model import Share, build, loss_of, parser_of_options


class Repaired(torchft.DistributedDataParallel):
    @staticmethod
    def _comm_hook(state: torchft.Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """After a failure the bucket holds anything; the manager knows and will not commit the step."""
        state.allreduce(bucket.buffer()).wait()  # in place, divided by the number of replicas
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    parser = parser_of_options()
    parser.add_argument("--as-published", action="store_true", help="with torchft's own gradient hook")
    parser.add_argument("--gloo-timeout-s", type=float, default=5.0, help="5 in torchft's example")
    options = parser.parse_args()
    replica = int(os.environ["REPLICA_GROUP_ID"])
    net, inner = build()

    def load_state(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=options.gloo_timeout_s)),
        load_state_dict=load_state,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"recovery_{replica}",
        timeout=timedelta(seconds=30),
    )
    model = (torchft.DistributedDataParallel if options.as_published else Repaired)(manager, net)
    optimizer = torchft.Optimizer(manager, inner)
    share, log = Share(replica), StepLog(options.out, replica)
    while (done := manager.current_step()) < options.steps:
        inputs, targets = share[done + 1]
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        if manager.current_step() > done:  # otherwise the step was not committed and is tried again
            # It has no public name, and without it a step that was all but finished at the kill looks like a recovery.
            log.finished(manager.current_step(), manager._quorum_id, manager.num_participants())
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
