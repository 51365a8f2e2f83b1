# SPDX-License-Identifier: Apache-2.0
"""Batch norm where the samples of a microbatch lie on several ranks (`fsdp`): its statistics are those of all of them.

The sums are exchanged inside of the replica, forward and backward; the running statistics then move once a microbatch,
alike on all ranks, as in one process. From there on they are buffers like any others. Made when the model is cut,
used by the grouped strategy.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.parallel.batch_norm import SynchronisedNorms


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


class SharedNorms(SynchronisedNorms):
    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(model, self._add)
        self._group = group
        self.has_samples = True  # else this rank computes somebody else's, only to take part in what is exchanged

    def _add(self, mine: Tensor, place: str) -> Tensor:
        total = mine if self.has_samples else torch.zeros_like(mine)
        dist.all_reduce(total, group=self._group)
        if place.startswith("backward"):
            return total if self.has_samples else torch.zeros_like(mine)  # what it computes moved no statistics
        if float(total[-1]) <= 1:  # as torch has it, where it sees all samples
            raise ValueError("Expected more than 1 value per channel when training")
        return total
