# SPDX-License-Identifier: Apache-2.0
"""Who computes and who serves, when a run has parameter servers. Pure; called by the quorum for every generation.

Any member can serve: it runs the same script and has the same model. So a lost server is replaced at once by somebody
who is here, as long as enough are left to compute. Hosts may wish for servers; apart from that, who serves goes on
serving. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.elastic.roster import Current, Rules, Worker


def servers_among(count: int, rules: Rules, target: int) -> int:
    """How many of `count` members serve: as many as asked for, or fewer where many are missing. None: everybody does
    both."""
    whole = target + rules.servers
    fair = rules.servers if count >= whole else max(min(1, rules.servers), count * rules.servers // whole)
    return max(0, min(fair, count - max(1, rules.min)))


def assigned(
    members: Sequence[Worker], before: Current, rules: Rules, target: int, wishes: Mapping[str, int] | None = None
) -> tuple[list[Worker], list[Worker]]:
    """The workers and the servers of the next generation, each in the order of `members`. `wishes`: by host, the first
    one first, how many should be there."""
    count = servers_among(len(members), rules, target)
    served = [worker for worker in members if worker.number in before.servers]
    others = [worker for worker in reversed(members) if worker not in served]  # the newest first
    ranked = served + others
    wished = [
        worker
        for host, number in (wishes or {}).items()
        for worker in [one for one in ranked if one.host == host][:number]
    ]
    rest = [worker for worker in ranked if worker not in wished]
    chosen = {worker.number for worker in (wished + rest)[:count]}
    return (
        [worker for worker in members if worker.number not in chosen],
        [worker for worker in members if worker.number in chosen],
    )
