# SPDX-License-Identifier: Apache-2.0
"""What replicas did to the weights: each one's difference from where the round began, added in tree order.

Holds the round's start and puts it back, so that outside of a replica's updates the model holds the global weights.
One worker's part; called by the local strategies. Knows nothing of data, optimizers or other workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.comm.tree import Landing
from unisono.parallel.sums import Sums, wide


class Differences:
    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], fragments: Sequence[int] | None = None) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.sums = Sums([(name, parameter.detach()) for name, parameter in named], fragments)
        self.start = [torch.empty_like(p, dtype=wide(p.dtype), requires_grad=False) for p in self.parameters]
        self.is_open = False  # a round has begun, and what it does can still be dropped

    @torch.no_grad()
    def begin(self, levels: int) -> None:
        self.sums.make_room(levels)
        for start, parameter in zip(self.start, self.parameters, strict=True):
            start.copy_(parameter)
        self.is_open = True

    @torch.no_grad()
    def land(self, bucket: int, weight: float, landing: Landing, own: Mapping[int, Tensor] | None = None) -> None:
        """Add what a replica, with this share of the round, did to the parameters of a bucket. `own`: its weights, by
        position, where they are not in the model."""
        for position in self.sums.members(bucket):
            weights, start = self.parameters[position] if own is None else own[position], self.start[position]
            self.sums.land(position, (weights.to(start.dtype) - start).mul_(weight), landing)

    @torch.no_grad()
    def put_back(self, bucket: int | None = None) -> None:
        """The weights of the round's start, of one bucket or of all."""
        if not self.is_open:
            return
        for position in range(len(self.parameters)) if bucket is None else self.sums.members(bucket):
            self.parameters[position].copy_(self.start[position])

    @torch.no_grad()
    def move(self, position: int, weights: Tensor) -> None:
        """The global weights are these from now on."""
        self.parameters[position].copy_(weights)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
