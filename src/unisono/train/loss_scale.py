# SPDX-License-Identifier: Apache-2.0
"""The loss scale of fp16: gradients too small for it are made larger on their way, and small again before the update.

It doubles after some steps without trouble, and halves when the sum of all gradients is not finite: that step is
skipped. The reduced gradient decides, which is the same on every worker, so all decide alike; where the ranks of a
replica hold a part of it each, they go by the worst. Its state travels with the model and is saved with checkpoints
(Micikevicius et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

START, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**-14
GROWS_AFTER = 2000  # steps


class LossScale:
    def __init__(self, start: float = START, grows_after: int = GROWS_AFTER) -> None:
        self.factor, self.grows_after = start, grows_after
        self.good = 0  # steps since it last changed
        self.skipped = 0

    def accept(self, parameters: Iterable[nn.Parameter], agree: Callable[[bool], bool] = bool) -> str:
        """Take the factor out of the gradients again; or say why this step must be skipped. `agree`: whether it is so
        for all ranks that hold a part of them."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if agree(_take_out(gradients, self.factor)):
            self.good += 1
            if self.good >= self.grows_after and self.factor < LARGEST:
                self.factor, self.good = self.factor * 2, 0
            return ""
        before, self.good = self.factor, 0
        self.factor = max(SMALLEST, before / 2)
        self.skipped += 1
        return f"gradients overflowed fp16 at a loss scale of {before:g}, which is {self.factor:g} from now on"

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.good, self.skipped = float(state["factor"]), int(state["good"]), int(state["skipped"])


class NoScale:
    """Where the range of the numbers is enough."""

    factor: float = 1.0

    def accept(self, parameters: Iterable[nn.Parameter], agree: Callable[[bool], bool] = bool) -> str:  # noqa: ARG002
        return ""


def _take_out(gradients: list[Tensor], factor: float) -> bool:
    """Whether all are finite; they are divided in place. Factors are powers of two, so nothing is rounded."""
    if not gradients:
        return True
    found = torch.zeros((), device=gradients[0].device)
    inverse = torch.full((), 1.0 / factor, device=gradients[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    return not bool(found.item())
