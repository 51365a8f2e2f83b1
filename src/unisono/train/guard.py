# SPDX-License-Identifier: Apache-2.0
"""The guard against silent corruption: replicas must hold the same weights, and now and then they compare.

A checksum of the parameters rides along with a step's small exchange, so comparing costs no message. Any single flipped
bit changes it. A worker that is outvoted leaves, and because its gradients have been in everybody's steps since, the
rest go back to the last state on which all agreed and compute those steps again. Two workers do the same first, and
then see which of them had been wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.core.errors import PeerLost, ReplicasDisagree

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = (1 << 47) - 115  # a prime whose residues a float64 holds exactly


class Corrupted(PeerLost):
    """Some workers hold other weights than the rest. The generation is given up; they are not in the next one."""

    def __init__(self, workers: Sequence[int], step: int) -> None:
        many = len(workers) > 1
        super().__init__(
            f"worker{'s' if many else ''} {', '.join(map(str, workers))} {'hold' if many else 'holds'} other weights "
            f"than the rest, before step {step + 1}",
            cause="memory or a processor that errs, or parameters changed outside the optimizer",
        )
        self.workers = tuple(workers)


class ComputeAgain(Exception):
    """Two workers disagree: the state has been put back to where they agreed, and the loop goes on from there."""


@dataclass(frozen=True)
class Dispute:
    step: int
    sums: dict[int, float]  # by worker


@dataclass
class Guard:
    """`every` steps; 0 for never. `snapshot` is the last state on which all agreed; the first workers keep one."""

    model: nn.Module
    every: int
    snapshot: Any = None
    dispute: Dispute | None = field(default=None)

    def due(self, step: int, workers: int) -> float:
        """The checksum of the weights before this step, or 0 when they are not compared at it."""
        disputed = self.dispute is not None and self.dispute.step == step
        if workers < 2 or not self.every or (step % self.every and not disputed):
            return 0.0
        return float(checksum(self.model) or 1)

    def judge(self, step: int, sums: dict[int, float]) -> list[int]:
        """Workers that hold other weights than they should. Raises `ComputeAgain` when only that can tell."""
        votes = Counter(sums.values()).most_common()
        if len(votes) == 1:
            return self._settle(step, votes[0][0])
        if votes[0][1] * 2 > len(sums):
            return [worker for worker, value in sums.items() if value != votes[0][0]]
        if self.snapshot is None or len(sums) > 2 or self.dispute is not None:
            raise ReplicasDisagree(
                f"workers {', '.join(map(str, sums))} hold different weights before step {step + 1}, and there is no "
                "majority",
                cause="a machine that computes or remembers wrongly, or parameters changed outside the optimizer",
                do="run it again with the same seed and at least three workers: then the faulty one is named",
            )
        self.dispute = Dispute(step, dict(sums))
        raise ComputeAgain

    def _settle(self, step: int, agreed: float) -> list[int]:
        """Computed again, both agree. The one that had another result before is wrong; not so when both had."""
        dispute = self.dispute
        if dispute is None or dispute.step != step:
            return []
        self.dispute = None
        wrong = [worker for worker, old in dispute.sums.items() if old != agreed]
        return wrong if len(wrong) < len(dispute.sums) else []

    def keep(self, state: Any) -> None:
        self.snapshot = _copied(state)

    def last_agreed(self) -> Any:
        """A copy: what is loaded may be changed in place."""
        return _copied(self.snapshot)


def _copied(value: Any) -> Any:
    """A copy of a state tree, tensors in CPU memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


@torch.no_grad()
def checksum(model: nn.Module) -> int:
    total = 0
    for parameter in model.parameters():
        total = (total * 31 + _sum_of_bits(parameter.detach())) % _MODULUS
    return total


def _sum_of_bits(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    flat = tensor.contiguous().view(-1)
    integers = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return int(integers.view(_INTEGERS[integers.element_size()]).sum(dtype=torch.int64).item())
