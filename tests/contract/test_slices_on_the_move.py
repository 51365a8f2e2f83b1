# SPDX-License-Identifier: Apache-2.0
"""Slices that move to new owners when a peer is lost: whoever has let go of its old ones, somebody has the new."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Network, in_threads, network
from torch import Tensor, nn

from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.server import ParameterServer
from unisono.parallel.strategy import Microbatch


def membership(net: Network, generation: int, members: tuple[int, ...]) -> Membership:
    """Worker 0 computes, the others serve."""
    ranges = (range(1), *(range(1, 1) for _ in members[1:]))
    return net.place(Membership(generation, members, ranges))


def made(kind: type[AllReduce], comm: Comm) -> AllReduce:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(40, 20)
    return kind(model, torch.optim.AdamW(model.parameters(), lr=0.01), comm)


def one_step(strategy: AllReduce, step: int) -> None:
    def loss() -> Tensor:
        return strategy.model(torch.arange(80.0).view(2, 40) / 80 + step).square().mean()

    strategy.begin_step([1.0])
    for index, _ in strategy.work(strategy._assignment.mine, 1):
        strategy.forward_backward(Microbatch(step, index, 1.0), loss)
    strategy.reduce([])
    strategy.step(0.0, float)


def form(strategies: dict[int, AllReduce], members: Membership) -> None:
    in_threads([partial(strategies[worker].comm.reconfigure, members) for worker in members.members])
    in_threads([partial(strategies[worker].configure, members) for worker in members.members])


@pytest.mark.parametrize("late", [1, 2], ids=["the old owner", "the new owner"])
def test_who_does_not_hear_that_all_have_theirs_keeps_both(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with network("threads") as net:
        strategies: dict[int, Any] = {worker: made(ParameterServer, net.comm(worker)) for worker in range(3)}
        form(strategies, membership(net, 1, (0, 1)))
        in_threads([partial(one_step, strategies[worker], 0) for worker in (0, 1)])

        strategies[2].state_in(strategies[0].state_out())
        breaking, take = strategies[late], strategies[late]._take

        def take_and_break(*arguments: Any) -> None:
            gather = breaking.comm.gather

            def broken(tensor: Tensor) -> None:
                gather(tensor)  # the others hear of it
                raise PeerLost("the last word was lost")

            with monkeypatch.context() as patch:
                patch.setattr(breaking.comm, "gather", broken)
                take(*arguments)

        def configure(worker: int, members: Membership) -> bool:
            try:
                strategies[worker].configure(members)
            except PeerLost:
                return True
            return False

        second = membership(net, 2, (0, 1, 2))
        in_threads([partial(strategies[worker].comm.reconfigure, second) for worker in range(3)])
        with monkeypatch.context() as patch:
            patch.setattr(breaking, "_take", take_and_break)
            assert in_threads([partial(configure, worker, second) for worker in range(3)]) == [
                worker == late for worker in range(3)
            ]
        for worker in range(3):
            strategies[worker].configure(None)
        form(strategies, replace(second, generation=3))
        in_threads([partial(one_step, strategies[worker], 1) for worker in range(3)])
        found = in_threads([strategies[worker].gathered_state for worker in range(3)])

        alone = made(AllReduce, net.comm(9))
        form({9: alone}, net.place(Membership(1, (9,), (range(1),))))
        for step in range(2):
            one_step(alone, step)
        expected = alone.state_out()
        for state in found:
            assert all(torch.equal(state["model"][name], value) for name, value in expected["model"].items())
            for number, kept in expected["optimizer"]["state"].items():
                assert all(torch.equal(state["optimizer"]["state"][number][name], kept[name]) for name in kept)
