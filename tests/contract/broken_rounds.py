# SPDX-License-Identifier: Apache-2.0
"""Rounds in which somebody is lost, for tests: who, where, and who goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from racing_rounds import LONGEST_S, Died, Replica, team
from ranks import in_threads, network
from torch import Tensor

from unisono.comm.asking import Words
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.owner import PART, PUSH


def broken_round(
    before: Membership,
    after: Membership,
    lost: int | None,
    at: int,
    copies: int = 1,
    bound: int | None = None,
    seed: int = 0,
    half_pushed: int = 0,
    left: list[Tensor] | None = None,
    kind_of_replica: type[Replica] = Replica,
    **options: Any,
) -> list[Tensor]:
    """`lost` dies while it computes its microbatch `at`; the rest, and those who come, finish the round as `after`.

    `half_pushed`: so many messages with gradients had the worker at rank 1 for the second owner when it loses that one,
    but not the first.
    `left` gets what their codes have not said.
    """
    with network("threads", 15) as net:
        everyone = sorted({*before.members, *after.members})
        comms = net.comms(everyone)
        ready = threading.Barrier(len(before.members))

        def life(number: int) -> Tensor | None:
            draw = random.Random(100 * seed + number)
            replica = kind_of_replica(comms[number], bound, copies, delay=lambda: draw.random() * LONGEST_S, **options)
            holds = number in before.members
            if holds:
                replica.dies_at = at if number == lost else -1
                comms[number].reconfigure(before)
                replica.heal(False)
                replica.strategy.configure(before)
                ready.wait(15)  # nobody dies before all have begun
                if half_pushed and number == before.members[1]:
                    breaks_between_owners(replica, before, half_pushed)
                try:
                    replica.round(before)
                    raise AssertionError("the round should have broken")
                except (Died, PeerLost) as error:
                    net.hub.abort(2)
                    if isinstance(error, Died):
                        return None
                    replica.strategy.configure(None)
                if number not in after.members:
                    return None
            comms[number].reconfigure(after)
            replica.heal(holds)
            replica.strategy.configure(after)
            replica.round(after)
            replica.strategy.close()
            if left is not None:
                left.append(replica.unsaid)
            return replica.model.weight.detach().clone()

        found = in_threads([partial(life, number) for number in everyone], 40)
    return [one for one in found if one is not None]


def breaks_between_owners(replica: Replica, membership: Membership, messages: int) -> None:
    begin, pushed = replica.strategy._begin_asking, [0]

    def ask(rank: int, words: Words) -> Callable[[], Words]:
        if words.what in (PART, PUSH) and rank == membership.owners[1]:
            pushed[0] += 1
            if pushed[0] == messages:
                raise PeerLost("as planned")
        return begin(rank, words)

    replica.strategy._begin_asking = ask  # type: ignore[method-assign]


LOSSES = {
    "a worker": (team(1, [0, 1, 2], [3]), team(2, [0, 2], [3])),
    "the first worker": (team(1, [1, 0, 2], [3, 4]), team(2, [0, 2], [3, 4])),
    "a worker, and another comes": (team(1, [0, 1], [3, 4]), team(2, [0, 5], [3, 4])),
    "a worker, and a worker begins to serve": (team(1, [0, 1, 2], [3]), team(2, [0], [2, 3])),
    "a worker, and who comes serves": (team(1, [0, 1], [2]), team(2, [0], [2, 3])),
}


SERVERS_LOST = {
    "the second": (team(1, [0, 1], [2, 3]), team(2, [0, 1], [2])),
    "the first": (team(1, [0, 1], [2, 3]), team(2, [0, 1], [3])),
    "one of three": (team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 4])),
    "one, and a worker takes its place": (team(1, [0, 1], [2, 3]), team(2, [0], [1, 2])),
    "one, and who comes takes its place": (team(1, [0, 1], [2, 3]), team(2, [0, 1], [2, 5])),
}
