# SPDX-License-Identifier: Apache-2.0
"""Rounds of local steps for tests: their samples, our way to go through them, and how plain PyTorch would."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ranks import together
from torch import Tensor, nn

from models import Case
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.membership import even
from unisono.core.ranges import split
from unisono.parallel.local import Local, LocalSteps
from unisono.parallel.strategy import Microbatch
from unisono.parallel.streaming import Streaming, fragments_of

REPLICAS, SEED = 4, 3
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=1e-3),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
}


def random_state(microbatch: Microbatch) -> int:
    return seeds.derive(SEED, "forward", *microbatch.place)


class Rounds:
    """The samples of some rounds: batch of turn t of round k for replica r; the last round may be short."""

    def __init__(
        self, case: Case, rounds: int, turns: int, batch_size: int, dtype: torch.dtype, short: int = 0
    ) -> None:
        self.case, self.rounds, self.turns = case, rounds, turns
        samples = [case.data[i % len(case.data)] for i in range(rounds * turns * batch_size - short)]  # type: ignore[arg-type]
        self.batches = []
        for first in range(0, len(samples), batch_size):
            chunk = samples[first : first + batch_size]
            self.batches.append([[chunk[i] for i in part] for part in split(len(chunk), REPLICAS)])
        self.dtype = dtype

    def turns_of(self, number: int, replica: int) -> list[tuple[Tensor, Tensor] | None]:
        steps = self.batches[number * self.turns : (number + 1) * self.turns]
        return [self._collated(step[replica]) for step in steps]

    def _collated(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        if not samples:
            return None
        inputs, targets = (torch.stack([sample[k] for sample in samples]) for k in (0, 1))
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs, (
            targets.to(self.dtype) if targets.is_floating_point() else targets
        )

    def counts(self, number: int) -> list[list[int]]:
        """By replica and turn."""
        return [
            [0 if turn is None else len(turn[0]) for turn in self.turns_of(number, replica)]
            for replica in range(REPLICAS)
        ]


def one_round(
    strategy: Local, model: nn.Module, rounds: Rounds, number: int, mine: range, fail_at: int | None = None
) -> float:
    """Up to the update. `fail_at`: an error in the last turn of this replica."""
    counts = rounds.counts(number)
    total = sum(map(sum, counts))
    strategy.begin_step([sum(row) / total for row in counts])
    for replica in mine:
        row, samples = counts[replica], sum(counts[replica])
        shares = tuple(count / samples if samples else 0.0 for count in row)
        computes = [functools.partial(loss_of, rounds.case, model, turn) for turn in rounds.turns_of(number, replica)]
        if replica == fail_at:
            computes[-1] = functools.partial(fail)
        strategy.forward_backward(Microbatch(number, replica, samples / total, shares), *computes)
    return strategy.reduce([]).loss


def fail() -> Tensor:
    raise RuntimeError("as planned")


def loss_of(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return case.loss(model(batch[0]), batch[1])


def made(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, local: LocalSteps) -> Local:
    kind = Local if local.fragments == 1 else Streaming
    return kind(model, optimizer, comm, random_state=random_state, local=local)


def by_unisono(
    model: nn.Module, optimizer: Optimizer, rounds: Rounds, local: LocalSteps, workers: int = 1, kind: str = "threads"
) -> tuple[nn.Module, list[float]]:
    membership = even(1, tuple(range(workers)), REPLICAS)

    def work(comm: Comm) -> tuple[nn.Module, list[float]]:
        own = copy.deepcopy(model)
        strategy = made(own, optimizer(own), comm, local)
        try:
            strategy.configure(membership)
            losses = []
            for number in range(rounds.rounds):
                losses.append(one_round(strategy, own, rounds, number, membership.ranges[comm.rank]))
                strategy.step(losses[-1], lambda: 0.0)
            return own, losses
        finally:
            strategy.close()

    results = together(kind, workers, work, membership=membership)
    for other, losses in results[1:]:
        assert losses == results[0][1]
        assert_same_bits(other, results[0][0])
    return results[0]


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, expected[name]), name


def by_hand(model: nn.Module, optimizer: Optimizer, rounds: Rounds, local: LocalSteps) -> tuple[nn.Module, list[float]]:
    """What a PyTorch user would write: R copies, each with an optimizer of its own; torch's SGD on the outside."""
    final = copy.deepcopy(model)
    outer = torch.optim.SGD(final.parameters(), lr=local.rate, momentum=local.momentum, nesterov=bool(local.momentum))
    replicas = [copy.deepcopy(model) for _ in range(REPLICAS)]
    optimizers = [optimizer(replica) for replica in replicas]
    losses = []
    for number in range(rounds.rounds):
        counts = rounds.counts(number)
        total, loss = sum(map(sum, counts)), 0.0
        for index, (replica, inner) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.load_state_dict(final.state_dict())
            if local.inner_state == "reset":
                inner.state.clear()
            for turn, batch in enumerate(rounds.turns_of(number, index)):
                if batch is not None:
                    seeds.apply(random_state(Microbatch(number, index, 1.0, turn=turn)))
                    value = loss_of(rounds.case, replica, batch)
                    inner.zero_grad()
                    value.backward()
                    inner.step()
                    loss += value.item() * len(batch[0]) / total
        weights = [sum(row) / total for row in counts]
        with torch.no_grad():
            for name, p in final.named_parameters():
                others = [dict(replica.named_parameters())[name] for replica in replicas]
                p.grad = -sum(((o - p) * w for o, w in zip(others, weights, strict=True)), torch.zeros_like(p))
            for name, b in final.named_buffers():
                others = [dict(replica.named_buffers())[name] for replica in replicas]
                if b.is_floating_point() and not torch.equal(b, others[0]):
                    b.copy_(sum(o * w for o, w in zip(others, weights, strict=True)))
        outer.step()
        losses.append(loss)
    return final, losses


@torch.no_grad()
def by_hand_in_fragments(model: nn.Module, optimizer: Optimizer, rounds: Rounds, local: LocalSteps) -> nn.Module:
    """Streaming DiLoCo as its paper has it, on R copies; a model without buffers."""
    final, replicas = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(REPLICAS)]
    optimizers = [optimizer(replica) for replica in replicas]
    copies = [list(replica.parameters()) for replica in replicas]
    weights, alpha = list(final.parameters()), local.own_share
    velocity = [torch.zeros_like(p) for p in weights]
    part_of = fragments_of([p.numel() for p in weights], local.fragments)

    def blend(number: int, come: dict[int, Tensor]) -> None:
        for i in (i for i, part in enumerate(part_of) if part == number):
            for each in copies:
                each[i].copy_(alpha * each[i] + (1 - alpha) * come[i])

    for number in range(rounds.rounds):
        counts = rounds.counts(number)
        shares = [sum(row) / sum(map(sum, counts)) for row in counts]
        come: dict[int, Tensor] = {}
        for segment, turns in enumerate(split(len(counts[0]), local.fragments)):
            for index, (replica, inner) in enumerate(zip(replicas, optimizers, strict=True)):
                for turn in turns:
                    batch = rounds.turns_of(number, index)[turn]
                    if batch is not None:
                        with torch.enable_grad():
                            seeds.apply(random_state(Microbatch(number, index, 1.0, turn=turn)))
                            inner.zero_grad()
                            loss_of(rounds.case, replica, batch).backward()
                        inner.step()
            if segment:
                blend(segment - 1, come)
            for i in (i for i, part in enumerate(part_of) if part == segment):
                step = sum(
                    ((each[i] - weights[i]) * share for each, share in zip(copies, shares, strict=True)),
                    torch.zeros_like(weights[i]),
                )
                velocity[i] = local.momentum * velocity[i] + step
                come[i] = weights[i] + local.rate * (local.momentum * velocity[i] + step)
        blend(local.fragments - 1, come)
        for i, value in come.items():
            weights[i].copy_(value)
    return final
