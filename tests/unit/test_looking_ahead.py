# SPDX-License-Identifier: Apache-2.0
"""What a schedule will say in the steps to come is what it says when they come, and looking does not move it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from unisono.train.learning_rate import WarmUp
from unisono.train.looking_ahead import settings_ahead

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda _: None,
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "momentum too": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=40),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "several at once": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "warm-up": lambda o: WarmUp(o, 6, lr_scheduler.CosineAnnealingLR(o, 20)),
}


def optimizer_of(two_groups: bool = True) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.2}]
    groups += [{"params": [torch.nn.Parameter(torch.zeros(2))]}] * two_groups
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


@pytest.mark.filterwarnings("ignore::UserWarning")  # there is no optimizer step before those of the schedules
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("begun", [0, 1, 7])
def test_it_is_what_comes_when_the_steps_come(name: str, begun: int) -> None:
    optimizer = optimizer_of()
    schedule = SCHEDULES[name](optimizer)
    for _ in range(begun if schedule is not None else 0):
        schedule.step()
    before = copy.deepcopy(schedule.state_dict()) if schedule is not None else None
    ahead = settings_ahead(schedule, optimizer, 16)
    assert schedule is None or str(schedule.state_dict()) == str(before) or name in ("warm-up", "lambda")
    for turn in range(16):
        assert ahead[turn] == settings(optimizer), f"turn {turn}"
        if schedule is not None:
            schedule.step()
    if schedule is not None:
        assert any(one != ahead[0] for one in ahead), "it changes something"


def test_a_schedule_that_cannot_be_copied_keeps_its_settings_for_the_round() -> None:
    class Locked(lr_scheduler.StepLR):
        lock = None

    optimizer = optimizer_of()
    schedule = Locked(optimizer, 1, 0.5)
    schedule.lock = threading.Lock()  # type: ignore[assignment]
    assert settings_ahead(schedule, optimizer, 3) == [settings(optimizer)] * 3
    assert schedule.last_epoch == 0
