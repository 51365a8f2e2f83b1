# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a larger batch: scaling, and a warm-up before any other schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import unisono
from unisono.comm import state_tree
from unisono.core.errors import SetupError


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [("linear", 1024, 3.2), ("linear", 32, 0.1), ("linear", 16, 0.05), ("sqrt", 128, 0.2), ("sqrt", 8, 0.05)],
)
def test_the_learning_rate_grows_with_the_batch(rule: Any, batch: int, expected: float) -> None:
    assert unisono.scaled_lr(0.1, 32, batch, rule) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.1, 32, 64, "liner"), "did you mean.*linear"),
        ((0.1, 32, 64, "log"), "linear, sqrt"),
        ((0.1, 0, 64), "base_batch=0"),
        ((0.1, 32, -1), "batch=-1"),
        ((math.nan, 32, 64), "base_lr=nan"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        unisono.scaled_lr(*arguments)


THEN: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler] | None] = {
    "nothing": None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.7 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.8, 0.3], total_steps=30),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 1.0), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def scheduled(then: str, warm: int | None) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler | None]:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.8, 0.3)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    make = THEN[then]
    following = make(optimizer) if make else None
    return optimizer, following if warm is None else unisono.WarmUp(optimizer, warm, then=following)


def rates(optimizer: torch.optim.Optimizer, schedule: lr_scheduler.LRScheduler | None, steps: int) -> list[list[float]]:
    """What each of the next steps uses."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return found


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("warm", [1, 5])
def test_a_warm_up_rises_in_equal_parts_and_hands_over_without_a_jump(then: str, warm: int) -> None:
    got = rates(*scheduled(then, warm), 16)
    after = rates(*scheduled(then, None), 16)
    assert got[warm - 1 :] == after[: 17 - warm], "what follows is not the schedule as it would be by itself"
    for step in range(warm):
        assert got[step] == pytest.approx([full * (step + 1) / warm for full in after[0]])


def test_a_warm_up_may_start_above_zero() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    schedule = unisono.WarmUp(optimizer, 4, start=0.2)
    assert [row[0] for row in rates(optimizer, schedule, 6)] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 11])
def test_a_warm_up_that_is_taken_up_goes_on_exactly(then: str, stop: int) -> None:
    whole = rates(*scheduled(then, 5), 16)
    optimizer, schedule = scheduled(then, 5)
    assert schedule is not None
    first = rates(optimizer, schedule, stop)
    saved = state_tree.rebuild(*state_tree.flatten([optimizer.state_dict(), schedule.state_dict()]))
    optimizer, schedule = scheduled(then, 5)
    assert schedule is not None
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert first + rates(optimizer, schedule, 16 - stop) == whole
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_a_warm_up_that_cannot_work_is_refused() -> None:
    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    used = lr_scheduler.StepLR(optimizer, 3)
    optimizer.step()
    used.step()
    refused: list[tuple[Any, ...]] = [
        (optimizer, 0),
        (optimizer, 2.5),
        (optimizer, True),
        (nn.Linear(2, 2), 5),
        (optimizer, 5, lr_scheduler.ReduceLROnPlateau(optimizer)),
        (optimizer, 5, lr_scheduler.StepLR(other, 3)),
        (optimizer, 5, used),
        (optimizer, 5, "cosine"),
    ]
    for arguments in refused:
        with pytest.raises(SetupError):
            unisono.WarmUp(*arguments)
    with pytest.raises(SetupError, match=r"start=1\.5"):
        unisono.WarmUp(optimizer, 5, start=1.5)
    with pytest.raises(SetupError, match="jump"):
        unisono.WarmUp(optimizer, 5).step(3)


def test_a_warm_up_of_another_make_is_not_taken_up() -> None:
    saved = scheduled("cosine", 5)[1].state_dict()  # type: ignore[union-attr]
    with pytest.raises(SetupError, match="further schedule"):
        scheduled("nothing", 5)[1].load_state_dict(saved)  # type: ignore[union-attr]
    single = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(SetupError, match="2 groups"):
        unisono.WarmUp(single, 5, lr_scheduler.StepLR(single, 3)).load_state_dict(saved)
