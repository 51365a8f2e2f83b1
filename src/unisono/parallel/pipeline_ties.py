# SPDX-License-Identifier: Apache-2.0
"""Weights that several stages share: each rank keeps a copy, and their gradients are added over those ranks.

The copies start equal and get the same gradient bits in every run, so an optimizer that treats elements alike keeps
them equal. The owner, the first rank that holds one, adds in the order of the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.parallel.pipeline_layers import Tie


class TiedGradients:
    """`local`: this rank's parameters by name, as they are when a run begins: sharding may have replaced them."""

    def __init__(self, ties: Sequence[Tie], rank: int, group: dist.ProcessGroup) -> None:
        self._ties = [tie for tie in ties if rank in tie.ranks]
        self._rank, self._group = rank, group

    @contextlib.contextmanager
    def added(self, local: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Around a run: what it adds to shared gradients is added over the ranks, what was there before is not."""
        shared = [(tie, local[dict(tie.copies)[self._rank]]) for tie in self._ties]
        shared = [(tie, parameter) for tie, parameter in shared if parameter.requires_grad]
        before = [parameter.grad for _, parameter in shared]
        for _, parameter in shared:
            parameter.grad = None
        yield
        for (tie, parameter), earlier in zip(shared, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._add(tie, _local(parameter.grad))
            if earlier is not None:
                parameter.grad = earlier.add_(parameter.grad)

    @torch.no_grad()
    def _add(self, tie: Tie, gradient: Tensor) -> None:
        owner, *others = (dist.get_global_rank(self._group, rank) for rank in tie.ranks)
        room = gradient.contiguous()
        if self._rank == tie.ranks[0]:
            theirs = torch.empty_like(room)
            for other in others:
                dist.recv(theirs, other, self._group)
                room.add_(theirs)
            for other in others:
                dist.send(room, other, self._group)
        else:
            dist.send(room, owner, self._group)
            dist.recv(room, owner, self._group)
        if room is not gradient:
            gradient.copy_(room)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
