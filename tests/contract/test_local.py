# SPDX-License-Identifier: Apache-2.0
"""Local steps under the contract of strategies: what plain PyTorch does with R copies of a model, on any workers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from local_rounds import OPTIMIZERS, REPLICAS, Rounds, assert_same_bits, by_hand, by_unisono, made, one_round
from ranks import in_threads, network, together
from torch import Tensor, nn

from models import CASES, Case
from unisono.comm.seam import Comm
from unisono.core.errors import SetupError
from unisono.core.membership import even
from unisono.parallel.local import Local, LocalSteps

LOCALS = {
    "average": LocalSteps(h=3),
    "nesterov": LocalSteps(h=3, outer="nesterov"),
    "reset": LocalSteps(h=3, inner_state="reset"),
    "rate": LocalSteps(h=3, outer_lr=0.5),
}


# Not Adam on batch norm: the gradient of a bias in front of one is nothing but rounding, which Adam makes large.
MODELS = [*(("mlp", name) for name in OPTIMIZERS), ("cnn", "sgd"), ("cnn", "momentum")]


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize(("model", "optimizer"), MODELS)
def test_a_round_is_what_plain_pytorch_does_with_copies_of_the_model(local: str, optimizer: str, model: str) -> None:
    case = CASES[model]()
    torch.manual_seed(0)
    plain = case.model().double()
    rounds = Rounds(case, 4, 3, 17, torch.float64, short=0 if model == "cnn" else 20)
    ours, losses = by_unisono(plain, OPTIMIZERS[optimizer], rounds, LOCALS[local])
    expected, by_plain_losses = by_hand(plain, OPTIMIZERS[optimizer], rounds, LOCALS[local])
    assert losses == pytest.approx(by_plain_losses, rel=1e-11)
    for (name, mine), other in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert not torch.equal(mine, dict(plain.named_parameters())[name]), f"{name} has not moved"
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    for (name, mine), other in zip(ours.named_buffers(), expected.buffers(), strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "local",
    [LocalSteps(h=2, inner_state=s, outer=o) for s in ("keep", "reset", "average") for o in ("average", "nesterov")],
    ids=lambda local: f"{local.inner_state}-{local.outer}",
)
@pytest.mark.parametrize("model", ["mlp", "cnn", "lm"])
def test_the_bits_are_the_same_on_any_number_of_workers(local: LocalSteps, model: str) -> None:
    case = CASES[model]()
    torch.manual_seed(0)
    assert case.dropout_free is not None  # ranks are threads here, and share one random generator
    plain = case.dropout_free()
    rounds = Rounds(case, 3, 2, 13, torch.float32, short=0 if model == "cnn" else 11)
    alone, losses = by_unisono(plain, case.optimizer, rounds, local)
    for workers, kind in ((2, "threads"), (3, "mesh"), (4, "threads")):
        ours, others = by_unisono(plain, case.optimizer, rounds, local, workers, kind)
        assert others == losses
        assert_same_bits(ours, alone)


def test_one_local_step_with_plain_averaging_is_synchronous_sgd() -> None:
    """Not to the last bit, and it cannot be: R replicas round their own weights, all-reduce rounds one sum. In float64
    what is left is a few units in the last place of the weights for each step."""
    case = CASES["mlp"]()
    torch.manual_seed(0)
    plain = case.model().double()
    rounds = Rounds(case, 6, 1, 16, torch.float64, short=11)
    ours, losses = by_unisono(plain, OPTIMIZERS["sgd"], rounds, LocalSteps(h=1), workers=2)
    reference = copy.deepcopy(plain)
    optimizer = OPTIMIZERS["sgd"](reference)
    for number in range(rounds.rounds):
        batches = [turn for replica in range(REPLICAS) for turn in rounds.turns_of(number, replica) if turn is not None]
        inputs, targets = (torch.cat([batch[k] for batch in batches]) for k in (0, 1))
        loss = case.loss(reference(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert losses[number] == pytest.approx(loss.item(), rel=1e-13)
    for mine, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-14)


def everything(strategy: Local) -> list[Tensor]:
    """Weights, buffers, the optimizer's state, the outer momentum, what is carried; copies."""
    state = strategy.state_out()
    found = [*state["model"].values(), *state["outer"].values()]
    found += [v for entry in state["optimizer"]["state"].values() for v in entry.values() if isinstance(v, Tensor)]
    found += [t for _, own in sorted(strategy.carried.mine.items()) for t in own.values()]
    return [tensor.clone() for tensor in found]


TRANSACTIONS = [LocalSteps(h=2, outer="nesterov", inner_state=state) for state in ("keep", "reset", "average")]


@pytest.mark.parametrize("local", [*TRANSACTIONS, LocalSteps(h=2, outer="nesterov", fragments=2)], ids=str)
@pytest.mark.parametrize("when", ["in a turn", "after the exchange"])
def test_a_round_that_is_abandoned_has_not_happened(local: LocalSteps, when: str) -> None:
    case = CASES["cnn"]()
    torch.manual_seed(0)
    plain = case.model()
    rounds = Rounds(case, 3, 2, 13, torch.float32)
    membership = even(1, (0,), REPLICAS)

    def work(comm: Comm) -> tuple[nn.Module, list[float]]:
        own = copy.deepcopy(plain)
        strategy = made(own, case.optimizer(own), comm, local)
        strategy.configure(membership)
        losses = []
        for number in range(rounds.rounds):
            before = everything(strategy)
            if when == "in a turn":
                with pytest.raises(RuntimeError, match="as planned"):
                    one_round(strategy, own, rounds, number, range(REPLICAS), fail_at=2)
            else:
                one_round(strategy, own, rounds, number, range(REPLICAS))
            strategy.configure(None)
            after = everything(strategy)
            assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
            assert all(p.grad is None for p in own.parameters())
            strategy.configure(membership)
            losses.append(one_round(strategy, own, rounds, number, range(REPLICAS)))
            strategy.step(losses[-1], lambda: 0.0)
        return own, losses

    ((ours, losses),) = together("threads", 1, work, membership=membership)
    calm, calm_losses = by_unisono(plain, case.optimizer, rounds, local)
    assert losses == calm_losses
    assert_same_bits(ours, calm)


@pytest.mark.parametrize("inner_state", ["keep", "average"])
def test_state_out_and_in_carries_a_training_over(inner_state: Any) -> None:
    case = CASES["lstm"]()
    local = LocalSteps(h=2, outer="nesterov", inner_state=inner_state)
    rounds = Rounds(case, 4, 2, 9, torch.float32)
    membership = even(1, (0,), REPLICAS)

    def work(comm: Comm) -> nn.Module:
        torch.manual_seed(0)
        models = [case.model(), case.model()]
        one, two = (made(m, case.optimizer(m), comm, local) for m in models)
        one.configure(membership)
        for number in range(2):
            one.step(one_round(one, models[0], rounds, number, range(REPLICAS)), lambda: 0.0)
        two.state_in(copy.deepcopy(one.state_out()))
        given = {replica: dict(state) for replica, state in one.carried.mine.items()}
        two.carried.begin_from(2, lambda replica: given[replica])
        two.configure(membership)
        for number in range(2, 4):
            for strategy, model in zip((one, two), models, strict=True):
                strategy.step(one_round(strategy, model, rounds, number, range(REPLICAS)), lambda: 0.0)
        assert_same_bits(models[1], models[0])
        return models[0]

    together("threads", 1, work, membership=membership)


def regrouped(
    plain: nn.Module, case: Case, rounds: Rounds, local: LocalSteps, second: Sequence[int]
) -> tuple[nn.Module, tuple[int, ...]]:
    """Two rounds on three workers, the rest on some of them; the others are gone without a word."""
    with network("threads") as net:
        comms = net.comms(range(3))
        first, then = even(1, (0, 1, 2), REPLICAS), even(2, tuple(second), REPLICAS)

        def run(worker: int) -> tuple[nn.Module, tuple[int, ...]]:
            own, comm = copy.deepcopy(plain), comms[worker]
            strategy = made(own, case.optimizer(own), comm, local)
            for membership, numbers in ((first, range(2)), (then, range(2, rounds.rounds))):
                if worker not in membership.members:
                    break
                comm.reconfigure(net.place(membership))
                strategy.configure(membership)
                for number in numbers:
                    loss = one_round(strategy, own, rounds, number, membership.ranges[comm.rank])
                    strategy.step(loss, lambda: 0.0)
            strategy.close()
            return own, strategy.carried.lost

        results = dict(zip(comms, in_threads([functools.partial(run, worker) for worker in comms]), strict=True))
        return results[second[0]]


@pytest.mark.parametrize("local", [LocalSteps(h=2), LocalSteps(h=2, fragments=2)], ids=str)
def test_what_a_replica_keeps_moves_with_it_and_a_death_costs_only_that(local: LocalSteps) -> None:
    case = CASES["lstm"]()
    torch.manual_seed(0)
    plain, rounds = case.model(), Rounds(case, 4, 2, 9, torch.float32)
    alone, _ = by_unisono(plain, case.optimizer, rounds, local)
    moved, lost = regrouped(plain, case, rounds, local, (2, 0, 1))
    assert not lost
    assert_same_bits(moved, alone)
    died, lost = regrouped(plain, case, rounds, local, (0, 2))
    assert lost, "nobody else had them"
    assert not torch.equal(died.out.weight, alone.out.weight)


@pytest.mark.parametrize("local", [LocalSteps(h=2, inner_state="reset"), LocalSteps(h=2, inner_state="average")])
def test_without_state_of_its_own_a_replica_loses_nothing_with_its_worker(local: LocalSteps) -> None:
    case = CASES["lstm"]()
    torch.manual_seed(0)
    plain, rounds = case.model(), Rounds(case, 4, 2, 9, torch.float32)
    alone, _ = by_unisono(plain, case.optimizer, rounds, local)
    died, lost = regrouped(plain, case, rounds, local, (0, 2))
    assert not lost
    assert_same_bits(died, alone)


class Hidden(torch.optim.SGD):
    """Keeps a count in its parameter groups, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


class Common(torch.optim.SGD):
    """Keeps state for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"] = {"count": 1}  # type: ignore[index]
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(torch.optim.LBFGS, "LBFGS"), (Hidden, "parameter groups"), (Common, "not under a parameter")],
)
def test_optimizers_whose_state_cannot_be_told_apart_by_replica_are_refused(optimizer: Any, words: str) -> None:
    def work(comm: Comm) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises(SetupError, match=words):
            Local(model, optimizer(model.parameters(), lr=0.1), comm)

    together("threads", 1, work)


@pytest.mark.parametrize(
    "asked",
    [
        {"h": 0},
        {"h": 4, "fragments": 5},
        {"outer": "nestorov"},
        {"inner_state": "kept"},
        {"outer_momentum": 0.9},
        {"outer": "nesterov", "outer_momentum": 1.0},
        {"outer_lr": 0.0},
        {"alpha": 0.5},
    ],
    ids=str,
)
def test_settings_that_cannot_take_effect_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(SetupError):
        LocalSteps(**asked)


class Fork(nn.Module):
    """Which layer is used depends on the data; a third one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)


@pytest.mark.parametrize("inner_state", ["keep", "average"])
def test_layers_that_only_some_replicas_reach_have_state_only_there(inner_state: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(24, 3)
    inputs[:, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat_interleave(3).repeat(2)
    data = torch.utils.data.TensorDataset(inputs, torch.ones(24, 1))
    case = Case(Fork, data, nn.functional.mse_loss, lambda m: torch.optim.Adam(m.parameters(), lr=0.1), 12)
    plain, local = Fork(), LocalSteps(h=1, inner_state=inner_state)
    rounds = Rounds(case, 4, 1, 12, torch.float32)
    alone, _ = by_unisono(plain, case.optimizer, rounds, local)
    for workers in (2, 4):
        ours, _ = by_unisono(plain, case.optimizer, rounds, local, workers)
        assert_same_bits(ours, alone)
    assert torch.equal(alone.never.weight, plain.never.weight)
    expected, _ = by_hand(plain, case.optimizer, rounds, local)
    if inner_state == "keep":
        torch.testing.assert_close(alone.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
