# SPDX-License-Identifier: Apache-2.0
"""Servers are added and taken away between rounds: their slices are of one size again, and every piece counts once."""

from __future__ import annotations

from functools import partial

import pytest
from racing_rounds import WAYS, Replica, assert_counted_once, team
from ranks import in_threads, network

from unisono.comm.seam import Comm

pytestmark = pytest.mark.usefixtures("one_thread_each")

ROWS = 600
TEAMS = [team(1, [0, 1], [2]), team(2, [0, 1], [2, 3, 4]), team(3, [0, 1], [2])]


@pytest.mark.parametrize("way", WAYS)
def test_one_server_becomes_three_and_one_again(way: str) -> None:
    with network("threads", 15) as net:
        held: dict[tuple[int, int], int] = {}

        def life(number: int, comm: Comm) -> Replica:
            replica = Replica(comm, None, rounds=len(TEAMS), rows=ROWS, **WAYS[way])
            for at, membership in enumerate(TEAMS):
                if number in membership.members:
                    comm.reconfigure(membership)
                    replica.heal(holds=number in TEAMS[0].members)
                    replica.strategy.configure(membership)
                    replica.round(membership, at)
                    held[at, number] = replica.strategy.held_bytes
                    replica.strategy.hand_over(leaves=number not in TEAMS[(at + 1) % len(TEAMS)].members)
                    replica.strategy.configure(None)
            replica.strategy.close()
            return replica

        replicas = in_threads([partial(life, number, comm) for number, comm in net.comms(range(5)).items()], 40)
    for number in TEAMS[-1].members:
        assert_counted_once(replicas[number].model.weight)
    before, after = held[0, 2], [held[1, number] for number in (2, 3, 4)]
    assert sum(after) == held[2, 2] == before > ROWS * 100
    assert max(after) <= 1.05 * min(after)
    assert all(held[at, worker] == 0 for at in range(3) for worker in (0, 1))
