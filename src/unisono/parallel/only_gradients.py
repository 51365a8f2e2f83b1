# SPDX-License-Identifier: Apache-2.0
"""The gradients of a step of one microbatch that nobody else has a part of: left where autograd puts them.

No hooks, no buckets, no copies: such a step costs what it costs in a plain loop. `allreduce` drives it like any other
`Gradients` and does not ask which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from unisono.parallel.gradients import Assignment, Gradients, sparse_error


class OnlyGradients(Gradients):
    def _listen(self) -> list[Any]:
        return []

    def begin_step(self, assignment: Assignment, on_ready: Callable[[int], None]) -> None:  # noqa: ARG002
        self._assignment = assignment
        self.used = [False] * len(self.parameters)
        self.drop()

    def end_microbatch(self) -> list[int]:
        """What got no gradient got none anywhere, which is nothing to be told."""
        self.cursor = None
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    raise sparse_error(self.names[position])
                self.used[position] = True
        return []

    def deliver(self, name: str, gradient: Tensor) -> None:
        """Where ranks share a model, autograd has put it elsewhere; it is not copied."""
        position = self._positions.get(name)
        if position is not None:
            self.parameters[position].grad = gradient

    def publish(self, used_by_anyone: Sequence[bool]) -> None:
        """They are where they should be."""
