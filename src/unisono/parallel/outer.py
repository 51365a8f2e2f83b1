# SPDX-License-Identifier: Apache-2.0
"""What happens to the global weights when the replicas of a round have come back: the outer optimizer.

*average*: the replicas' mean. *nesterov*: their mean difference is taken as a step that an SGD with Nesterov momentum
makes (DiLoCo, Douillard et al. 2023: 0.7 and 0.9). The momentum is part of the run's state, by parameter name. Called
by the local strategies; knows nothing of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Outer:
    def __init__(self, lr: float, momentum: float) -> None:
        """Without momentum, and with a rate of 1, this is the mean."""
        self.lr, self.momentum = lr, momentum
        self.velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def moved(self, name: str, start: Tensor, difference: Tensor) -> tuple[Tensor, Tensor | None]:
        """The new weights and the new velocity; nothing has changed until `keep`. All of the shape of `start`."""
        if not self.momentum:
            step = difference if self.lr == 1.0 else difference * self.lr
            return start + step, None
        before = self.velocity.get(name)
        velocity = difference.clone() if before is None else before * self.momentum + difference
        return start + (velocity * self.momentum + difference) * self.lr, velocity

    def keep(self, name: str, velocity: Tensor | None) -> None:
        if velocity is not None:
            self.velocity[name] = velocity

    def state_out(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.velocity.items()}

    def state_in(self, state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        """`like`: the parameters, which say where it lives."""
        self.velocity = {name: value.to(like[name].device, copy=True) for name, value in state.items()}
