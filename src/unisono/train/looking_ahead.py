# SPDX-License-Identifier: Apache-2.0
"""What a learning-rate schedule will say in the next steps, without stepping it: for rounds of several steps.

A copy of the schedule is stepped, with a copy of the optimizer's settings in the optimizer's place. That is right for
schedules that follow from the number of the step alone; one that cannot be copied keeps its settings for the round.
Called through `Asynchronous.settings_ahead`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.parallel.optimizer_trials import like


def settings_ahead(schedule: Any, optimizer: Optimizer, turns: int) -> Sequence[Sequence[Mapping[str, Any]]]:
    """By turn, by group of parameters: the settings that are in force when it is made."""
    found = [_settings(optimizer)]
    if isinstance(schedule, LRScheduler) and turns > 1:
        other = like(optimizer)
        other.param_groups = [{**group, "params": []} for group in _settings(optimizer)]
        try:
            ahead = copy.deepcopy(schedule, {id(optimizer): other})
        except Exception:  # it holds on to something that cannot be copied
            return found * turns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer has stepped between these steps, and need not
            for _ in range(turns - 1):
                ahead.step()
                found.append(_settings(other))
    return found + found[-1:] * (turns - len(found))


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
