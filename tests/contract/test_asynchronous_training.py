# SPDX-License-Identifier: Apache-2.0
"""Workers that do not wait for each other, against plain training in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from racing_rounds import MICROBATCHES, TURNS, WEIGHT, Replica, lives, sized
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.strategy import Microbatch

pytestmark = pytest.mark.usefixtures("one_thread_each")


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)
        self.norm: nn.Module = nn.BatchNorm1d(40) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, 6, generator=seeded), torch.randint(0, 3, (3,), generator=seeded)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def trained(
    model: nn.Module,
    optimizer: str,
    membership: Membership,
    rounds: int,
    kind: str = "threads",
    freeze_at: int = 99,
) -> list[tuple[nn.Module, list[float], dict[str, Any]]]:
    """Model, losses and gathered state of each rank."""
    with network(kind, 15) as net:
        comms = net.comms(membership.members)
        placed, parts = net.place(membership), [WEIGHT] * MICROBATCHES

        def life(number: int) -> tuple[nn.Module, list[float], dict[str, Any]]:
            own = copy.deepcopy(model)
            strategy = Asynchronous(own, OPTIMIZERS[optimizer](own), comms[number])
            comms[number].reconfigure(placed)
            strategy.configure(placed)
            losses = []
            for number_of_round in range(rounds):
                if number_of_round == freeze_at:
                    own.first.requires_grad_(False)  # type: ignore[operator, union-attr]
                strategy.begin_step(parts)
                for index, turn in strategy.work(placed.ranges[comms[number].rank], TURNS):
                    step = number_of_round * TURNS + turn
                    compute = partial(loss_of, own, step, index)
                    strategy.forward_backward(Microbatch(step, index, WEIGHT), compute)
                losses.append(strategy.reduce([]).loss)
                strategy.step(losses[-1], lambda: 0.0)
            state = copy.deepcopy(strategy.gathered_state())
            strategy.close()
            return own, losses, state

        try:
            return in_threads([partial(life, number) for number in membership.members], 40)
        finally:
            for comm in comms.values():
                comm.close()


def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
    inputs, targets = batch_of(step, index)
    return nn.functional.cross_entropy(model(inputs), targets)


def plainly(model: nn.Module, optimizer: str, rounds: int, freeze_at: int = 99) -> tuple[nn.Module, list[float], Any]:
    own = copy.deepcopy(model)
    update, losses = OPTIMIZERS[optimizer](own), []
    for step in range(rounds * TURNS):
        if step == freeze_at * TURNS:
            own.first.requires_grad_(False)  # type: ignore[operator, union-attr]
        update.zero_grad()
        loss = torch.stack([loss_of(own, step, index) for index in range(MICROBATCHES)]).mean()
        loss.backward()
        update.step()
        losses.append(float(loss.detach()))
    means = [sum(losses[TURNS * at : TURNS * (at + 1)]) / TURNS for at in range(rounds)]
    return own, means, update.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("servers", [0, 1, 2, 3])
@pytest.mark.parametrize("freeze_at", [99, 1])
def test_one_worker_with_one_piece_a_step_trains_as_plain_pytorch_does(
    optimizer: str, servers: int, freeze_at: int
) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, losses, state = plainly(model, optimizer, 3, freeze_at)
    for own, found, gathered in trained(model, optimizer, sized(1, servers), 3, freeze_at=freeze_at):
        for mine, other in zip(own.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert found == pytest.approx(losses, rel=1e-5)
        entries = gathered["optimizer"]["state"]
        assert entries.keys() == state["state"].keys()
        for position, kept in entries.items():
            for name, value in kept.items():
                torch.testing.assert_close(value, state["state"][position][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("workers", "servers", "kind"), [(1, 1, "threads"), (3, 0, "threads"), (3, 2, "mesh")])
def test_at_the_end_of_a_round_everybody_has_the_same_weights_and_buffers(
    workers: int, servers: int, kind: str
) -> None:
    torch.manual_seed(0)
    model = Net(norm=True)
    found = trained(model, "adamw", sized(workers, servers), 2, kind)
    for own, losses, state in found:
        assert losses == found[0][1]
        for name, value in own.state_dict().items():
            assert torch.equal(value, found[0][0].state_dict()[name]), name
        assert str(state["optimizer"]) == str(found[0][2]["optimizer"])
    assert not torch.equal(found[0][0].norm.running_mean, torch.zeros(40))  # type: ignore[arg-type, union-attr]
    assert found[0][0].norm.running_var.isfinite().all()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["threads", "mesh"])
def test_the_loss_of_a_model_that_is_smaller_than_a_slice_is_told(servers: int, kind: str) -> None:
    """Some owners have nothing to own."""

    class Small(Net):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.first, self.last, self.norm = nn.Identity(), nn.Linear(6, 3), nn.Identity()  # type: ignore[assignment]

    torch.manual_seed(0)
    model = Small()
    for _, losses, _ in trained(model, "sgd", sized(2, servers), 2, kind):
        assert losses[0] == pytest.approx(1.2, abs=0.4)
        assert losses[1] == pytest.approx(1.2, abs=0.4)


def test_several_workers_learn_about_as_much_as_all_reduce_does() -> None:
    torch.manual_seed(0)
    model = Net()
    expected, _, _ = plainly(model, "sgd", 3)
    moved = [other - before for other, before in zip(expected.parameters(), model.parameters(), strict=True)]
    for own, _, _ in trained(model, "sgd", sized(4, 1), 3):
        ours = [mine - before for mine, before in zip(own.parameters(), model.parameters(), strict=True)]
        for mine, other in zip(ours, moved, strict=True):
            assert float((mine - other).norm()) < 0.2 * float(other.norm())
    assert issubclass(Asynchronous, AllReduce)


@pytest.mark.parametrize(("workers", "servers", "copies"), [(1, 0, 1), (2, 1, 1), (3, 2, 2)])
def test_an_update_has_the_learning_rate_of_its_own_step(workers: int, servers: int, copies: int) -> None:
    """Also inside a round, and whoever makes it when."""
    membership = sized(workers, servers)

    def life(replica: Replica) -> Tensor:
        replica.strategy.settings_ahead = lambda turns: [[{"lr": 1.0 / (1 + turn)}] for turn in range(turns)]
        replica.round(membership)
        return replica.model.weight.detach().clone()

    for weight in lives(membership, life, None, copies=copies):
        for turn, part in enumerate(weight.split(MICROBATCHES, 1)):
            torch.testing.assert_close(part, torch.full_like(part, WEIGHT / (1 + turn)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("servers", [0, 1])
def test_with_counts_a_piece_is_the_mean_over_what_is_counted(servers: int) -> None:
    """One worker has all microbatches of a step in one piece: then it is the mean over the whole step."""
    membership = sized(1, servers)

    def life(replica: Replica) -> Tensor:
        strategy = replica.strategy
        strategy.counts = True
        strategy.begin_step([WEIGHT] * MICROBATCHES)
        for index, turn in strategy.work(membership.ranges[replica.comm.rank], TURNS):
            compute = partial(replica.compute, turn, index)
            strategy.forward_backward(Microbatch(turn, index, float(10 * (index + 1))), compute)
        strategy.step(strategy.reduce([]).loss, lambda: 0.0)
        return replica.model.weight.detach().clone()

    for weight in lives(membership, life, None):
        shares = torch.tensor([1.0, 2.0, 3.0, 4.0]) / 10
        torch.testing.assert_close(weight[0].view(TURNS, MICROBATCHES), shares.expand(TURNS, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 1)])
def test_a_round_may_end_with_pieces_that_have_no_samples(workers: int, servers: int) -> None:
    """As the short batch at the end of an epoch gives them to some workers."""
    membership = sized(workers, servers)

    def life(replica: Replica) -> Tensor:
        strategy = replica.strategy
        strategy.begin_step([WEIGHT] * MICROBATCHES)
        for index, turn in strategy.work(membership.ranges[replica.comm.rank], TURNS):
            weight = WEIGHT if turn < TURNS - 1 else 0.0
            strategy.forward_backward(Microbatch(turn, index, weight), partial(replica.compute, turn, index))
        strategy.step(strategy.reduce([]).loss, lambda: 0.0)
        return replica.model.weight.detach().clone()

    for weight in lives(membership, life, None):
        trained, empty = weight[:, :-MICROBATCHES], weight[:, -MICROBATCHES:]
        torch.testing.assert_close(trained, torch.full_like(trained, WEIGHT), rtol=1e-5, atol=1e-6)
        assert not empty.any()
