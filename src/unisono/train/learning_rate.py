# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a larger batch: how far to scale it, and a warm-up before any other torch schedule.

Used by scripts; the trainer steps a `WarmUp` like every schedule, and saves it like every schedule. Goyal et al.,
"Accurate, Large Minibatch SGD", 2017, is where linear scaling with warm-up comes from.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.core.errors import SetupError, suggest

_RULES = {"linear": 1.0, "sqrt": 0.5}  # the power of the ratio of the batches


def scaled_lr(base_lr: float, base_batch: int, batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """The learning rate for `batch`, where `base_lr` is good for `base_batch`. A place to start a search from.

    "linear" is for SGD with and without momentum, "sqrt" for Adam, LAMB and the like.
    """
    if rule not in _RULES:
        hint = suggest(str(rule), _RULES)
        raise SetupError(f"scaled_lr knows no rule {rule!r}; {hint or 'known: linear, sqrt'}")
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch)):
        if not (value > 0 and math.isfinite(value)):
            raise SetupError(f"scaled_lr({name}={value}) cannot be scaled", do=f"give {name} as a number above 0")
    ratio = batch / base_batch
    return float(base_lr * (math.sqrt(ratio) if rule == "sqrt" else ratio))


class WarmUp(LRScheduler):
    """Step n of the first `steps` uses n/steps of the learning rate; `then` goes on from the full one.

        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=900)
        trainer = unisono.Trainer(..., schedule=unisono.WarmUp(optimizer, steps=100, then=cosine))

    The full learning rate is the one that `then` starts with, and the last step of the warm-up is the first of `then`:
    of both together, there are ``steps + T_max - 1``. Without `then` the learning rate stays where it is. `start` is
    the share to begin above: step n uses ``start + (1 - start) * n / steps``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: int, then: LRScheduler | None = None, *, start: float = 0.0
    ) -> None:
        _check(optimizer, steps, then, start)
        self.steps, self.then, self.start = steps, then, start
        self.full = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        done = self.last_epoch  # steps of the training, not epochs, in spite of torch's name
        if done < self.steps - 1:
            share = self.start + (1 - self.start) * (done + 1) / self.steps
            return [full * share for full in self.full]
        if done > self.steps - 1 and self.then is not None:
            return [group["lr"] for group in self.optimizer.param_groups]  # `then` has just set them
        return list(self.full)

    def step(self, epoch: int | None = None) -> None:
        if epoch is not None:
            raise SetupError("WarmUp cannot jump to another step", do="call step() without an argument")
        if self.then is not None and self.last_epoch >= self.steps - 1:
            self.then.step()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "start": self.start,
            "full": list(self.full),
            "done": self.last_epoch,
            "calls": self._step_count,
            "last": [float(lr) for lr in self._last_lr],
            "then": None if self.then is None else self.then.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As it was saved, whatever this one was built with. The optimizer's own state holds the learning rates."""
        if (state_dict["then"] is None) != (self.then is None):
            raise SetupError(
                f"the saved warm-up goes on with {'no' if self.then else 'a'} further schedule, this one does not",
                do="build the schedule as it was when the state was saved",
            )
        if len(state_dict["full"]) != len(self.optimizer.param_groups):
            raise SetupError(
                f"the saved warm-up is for {len(state_dict['full'])} groups of parameters, "
                f"and the optimizer has {len(self.optimizer.param_groups)}",
                do="build the optimizer as it was when the state was saved",
            )
        self.steps, self.start, self.full = state_dict["steps"], state_dict["start"], list(state_dict["full"])
        self.last_epoch, self._step_count = state_dict["done"], state_dict["calls"]
        self._last_lr = list(state_dict["last"])
        if self.then is not None:
            self.then.load_state_dict(state_dict["then"])


def _check(optimizer: torch.optim.Optimizer, steps: int, then: LRScheduler | None, start: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SetupError(f"WarmUp needs an optimizer first, and got a {type(optimizer).__name__}")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise SetupError(f"WarmUp(steps={steps!r}) warms nothing up", do="give steps as a whole number of 1 or more")
    if not 0 <= start <= 1:
        raise SetupError(f"WarmUp(start={start}) is no share of the learning rate", do="give start between 0 and 1")
    if isinstance(then, ReduceLROnPlateau):
        raise SetupError(
            "WarmUp cannot go on with ReduceLROnPlateau",
            cause="the one follows steps, the other evaluations",
            do="give another schedule as then",
        )
    if then is not None and not isinstance(then, LRScheduler):
        raise SetupError(f"WarmUp(then=...) is a {type(then).__name__}, not a torch learning-rate schedule")
    if then is not None and then.optimizer is not optimizer:
        raise SetupError("WarmUp(then=...) belongs to another optimizer", do="build both for the same optimizer")
    if then is not None and then.last_epoch > 0:
        raise SetupError(
            f"WarmUp(then=...) has made {then.last_epoch} steps already", do="build it fresh; WarmUp steps it"
        )
