# SPDX-License-Identifier: Apache-2.0
"""Not waiting for each other costs little: on the models of the tests, the loss comes to where it comes with waiting.

Several seeds and more ways of doing it: bench/staleness_loss.py.
"""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from racing_rounds import MICROBATCHES, sized
from ranks import in_threads, network
from torch import Tensor

from models import CASES, Case
from unisono.core.ranges import split
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.strategy import Microbatch

pytestmark = pytest.mark.usefixtures("one_thread_each")
SEEDS, TURNS = 3, 12
ROUNDS = {"cnn": 5, "lm": 3, "lstm": 8, "mlp": 5}
RATES = {"cnn": 0.01}  # with 0.05, some seeds never learn anything, also with waiting
WORSE = 0.1  # than with waiting at the most, as a share of what was learnt


def samples_of(case: Case, step: int, index: int | None = None) -> tuple[Tensor, Tensor]:
    """Of a step, or of one of its microbatches."""
    inputs, targets = case.data.tensors  # type: ignore[attr-defined]
    chosen = torch.arange(step * case.batch_size, (step + 1) * case.batch_size) % len(inputs)
    part = chosen if index is None else chosen[list(split(len(chosen), MICROBATCHES)[index])]
    return inputs[part], targets[part]


def built(name: str, case: Case, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    assert case.dropout_free is not None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.dropout_free()
    optimizer = case.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = RATES.get(name, group["lr"])
    return model, optimizer


def loss_of(case: Case, model: torch.nn.Module) -> float:
    inputs, targets = case.data.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(case.loss(model(inputs), targets))


@functools.cache
def with_waiting(name: str, seed: int) -> tuple[float, float]:
    """The loss before and after."""
    case = CASES[name]()
    model, optimizer = built(name, case, seed)
    before = loss_of(case, model)
    for step in range(ROUNDS[name] * TURNS):
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            inputs, targets = samples_of(case, step, index)
            (case.loss(model(inputs), targets) / MICROBATCHES).backward()
        optimizer.step()
    return before, loss_of(case, model)


def without(name: str, seed: int, bound: int | None, fresh: str) -> float:
    case, membership = CASES[name](), sized(2, 1)

    def life(number: int) -> float:
        comm = comms[number]
        strategy = Asynchronous(*models[number], comm, bound=bound, fresh=fresh)
        model = strategy.model

        def compute(step: int, index: int) -> Tensor:
            inputs, targets = samples_of(case, step, index)
            return case.loss(model(inputs), targets)

        comm.reconfigure(membership)
        strategy.configure(membership)
        for number_of_round in range(ROUNDS[name]):
            strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index, turn in strategy.work(membership.ranges[comm.rank], TURNS):
                step = number_of_round * TURNS + turn
                strategy.forward_backward(Microbatch(step, index, 1 / MICROBATCHES), partial(compute, step, index))
            strategy.reduce([])
            strategy.step(0.0, float)
        strategy.close()
        return loss_of(case, model)

    models = {number: built(name, case, seed) for number in membership.members}
    with network("threads", 30) as net:
        comms = net.comms(membership.members)
        return in_threads([partial(life, number) for number in membership.members], 90)[0]


@pytest.mark.parametrize(("bound", "fresh"), [(2, "pull"), (None, "pull"), (None, "push")])
@pytest.mark.parametrize("name", CASES)
def test_it_learns_about_as_much_as_with_waiting(name: str, bound: int | None, fresh: str) -> None:
    for seed in range(SEEDS):
        before, expected = with_waiting(name, seed)
        assert expected < 0.8 * before, "the task shows nothing"
        found = without(name, seed, bound, fresh)
        assert found < expected + WORSE * (before - expected), f"seed {seed}: {found:.3f}, with waiting {expected:.3f}"
