# SPDX-License-Identifier: Apache-2.0
"""Every update without waiting is made with the share of its step and the steps that it is late, on copies too."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

import pytest
import torch
from racing_rounds import MICROBATCHES, TURNS, sized
from ranks import in_threads, network
from torch import nn

from unisono.parallel import momentum
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.momentum import Motion, motion
from unisono.parallel.strategy import Microbatch

WORKERS = 2


@pytest.mark.parametrize(("servers", "copies"), [(1, 1), (2, 1), (2, 2)])
def test_momentum_follows_the_share_and_the_lateness_of_every_update(
    servers: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, lock = Counter[tuple[float, float, float]](), threading.Lock()

    def noted(decay: float, share: float, late: float, dampening: float, nesterov: bool) -> Motion:
        with lock:
            seen[decay, share, late] += 1
        return motion(decay, share, late, dampening, nesterov)

    monkeypatch.setattr(momentum, "motion", noted)
    membership = sized(WORKERS, servers)

    def life(number: int) -> Counter[int]:
        comm, model = comms[number], nn.Linear(64, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy = Asynchronous(model, optimizer, comm, copies=copies)
        comm.reconfigure(membership)
        strategy.configure(membership)
        strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
        for index, turn in strategy.work(membership.ranges[comm.rank], TURNS):
            strategy.forward_backward(Microbatch(turn, index, 1 / MICROBATCHES), lambda: model(torch.ones(1, 64)).sum())
        strategy.reduce([])
        strategy.step(0.0, float)
        strategy.close()
        return strategy.tallies.delays

    with network("threads", 30) as net:
        comms = net.comms(membership.members)
        tallied = in_threads([partial(life, number) for number in membership.members], 60)
    expected = Counter[tuple[float, float, float]]()
    for delays in tallied:
        for delay, count in delays.items():
            expected[0.9, 1 / WORKERS, delay / WORKERS] += copies * count
    assert sum(expected.values()) == servers * copies * WORKERS * TURNS
    assert seen == expected
