# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a tensor-parallel group exchange, with its backward pass (Shoeybi et al., "Megatron-LM", 2019).

A *whole* activation is the same on every rank, and so is its gradient. A *cut* one is a rank's part of it. A value
that every rank has whole but uses only for its own part has a gradient that must be summed. Nothing here knows modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Since torch 2.13 they are called like this, and complain under their old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Team:
    """The ranks among which one model is cut: who I am, how many we are."""

    group: dist.ProcessGroup
    rank: int
    ways: int

    def mine(self, tensor: Tensor, dim: int) -> Tensor:
        """My part of a whole tensor, as a view."""
        size = tensor.shape[dim] // self.ways
        return tensor.narrow(dim, self.rank * size, size)

    def sum(self, tensor: Tensor) -> Tensor:
        order = memory_order(tensor)
        total = tensor.permute(order).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total.permute(_inverse(order))

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """All parts, one after the other along `dim`."""
        first = tensor.movedim(dim, 0).contiguous()
        whole = first.new_empty(self.ways * first.shape[0], *first.shape[1:])
        all_gather(whole, first, group=self.group)
        return laid_like(whole.movedim(0, dim), tensor)

    def sum_to_mine(self, tensor: Tensor, dim: int) -> Tensor:
        """My part of the sum."""
        first = tensor.movedim(dim, 0).contiguous()
        part = first.new_empty(first.shape[0] // self.ways, *first.shape[1:])
        reduce_scatter(part, first, group=self.group)
        return laid_like(part.movedim(0, dim), tensor)


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest. Dropout draws in this order, so whatever is exchanged keeps it."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def laid_like(tensor: Tensor, model: Tensor) -> Tensor:
    """The same values, laid in memory in the order of `model`."""
    order = memory_order(model)
    return tensor.permute(order).contiguous().permute(_inverse(order))


class _SumBackward(torch.autograd.Function):
    """Whole, and about to be used for cut things."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.team.sum(grad), None


class _SumForward(torch.autograd.Function):
    """One term on each rank; their sum on all."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, team: Team) -> Tensor:
        return team.sum(tensor)

    @staticmethod
    @once_differentiable
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """Cut, made whole, used whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, team: Team, dim: int) -> Tensor:
        ctx.team, ctx.dim = team, dim
        return team.gather(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.team.mine(grad, ctx.dim), None, None


class _Split(torch.autograd.Function):
    """Whole, cut: each rank goes on with its part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, team: Team, dim: int) -> Tensor:
        ctx.team, ctx.dim = team, dim
        return laid_like(team.mine(tensor, dim), tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.team.gather(grad, ctx.dim), None, None


class _GatherSum(torch.autograd.Function):
    """Cut, made whole (`whole` has it already), used for cut things: its gradient is summed and cut in one go."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, whole: Tensor, team: Team, dim: int) -> Tensor:
        ctx.team, ctx.dim = team, dim
        return whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.team.sum_to_mine(grad, ctx.dim), None, None, None


class _SumToMine(torch.autograd.Function):
    """One term on each rank; of their sum, each rank goes on with its part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, team: Team, dim: int) -> Tensor:
        ctx.team, ctx.dim = team, dim
        return team.sum_to_mine(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.team.gather(grad, ctx.dim), None, None


def sum_backward(tensor: Tensor, team: Team) -> Tensor:
    return _SumBackward.apply(tensor, team)  # type: ignore[no-any-return, no-untyped-call]


def sum_forward(tensor: Tensor, team: Team) -> Tensor:
    return _SumForward.apply(tensor, team)  # type: ignore[no-any-return, no-untyped-call]


def gather(tensor: Tensor, team: Team, dim: int) -> Tensor:
    return _Gather.apply(tensor, team, dim)  # type: ignore[no-any-return, no-untyped-call]


def split(tensor: Tensor, team: Team, dim: int) -> Tensor:
    return _Split.apply(tensor, team, dim)  # type: ignore[no-any-return, no-untyped-call]


def gather_sum(part: Tensor, whole: Tensor, team: Team, dim: int) -> Tensor:
    return _GatherSum.apply(part, whole, team, dim)  # type: ignore[no-any-return, no-untyped-call]


def sum_to_mine(tensor: Tensor, team: Team, dim: int) -> Tensor:
    return _SumToMine.apply(tensor, team, dim)  # type: ignore[no-any-return, no-untyped-call]
