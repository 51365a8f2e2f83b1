# SPDX-License-Identifier: Apache-2.0
"""Batch norm over the whole batch of a step, whichever workers and microbatches it is spread over.

The sums that batch norm needs are taken per microbatch and added in the fixed tree, forward and backward, so the
statistics are those of the full batch and have the same bits on any number of workers (Ioffe and Szegedy 2015; the
backward sums as in Zhang et al., "Context encoding", 2018). Running statistics change once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Sum = Callable[[Tensor], Tensor]  # what I bring -> the sum over all microbatches


class Meet(Protocol):
    def __call__(self, mine: Tensor, place: str) -> Tensor: ...


class _Normalise(torch.autograd.Function):
    """`mean` and `scale` are as wide as float32 at least, and so is all that is computed with them; what comes in half
    precision goes out so, as torch has it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor, count: float, meet: Sum
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.count, ctx.meet = count, meet
        return (_normal(x, mean, scale) * _wide(weight, x) + _wide(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        normal, grad = _normal(x, mean, scale), grad.to(mean.dtype)
        axes = [0, *range(2, grad.ndim)]
        d_bias, d_weight = grad.sum(axes), (grad * normal).sum(axes)  # (c,)
        total = ctx.meet(torch.cat([d_bias, d_weight]).double()) / ctx.count
        mean_grad, mean_product = total.to(grad.dtype).chunk(2)
        d_x = (grad - _wide(mean_grad, grad) - normal * _wide(mean_product, grad)) * _wide(weight * scale, grad)
        return d_x.to(x.dtype), d_weight, d_bias, None, None, None, None


def _normal(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _wide(mean, x)) * _wide(scale, x)  # (n, c, ...)


def _wide(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.ndim - 2))


@dataclass
class _Pending:
    module: _BatchNorm
    mean: Tensor
    variance: Tensor  # unbiased, as running statistics want it


class SynchronisedNorms:
    """Takes over the forward pass of every batch norm in a model, and keeps their running statistics."""

    def __init__(self, model: nn.Module, meet: Meet) -> None:
        self._meet = meet
        self._pending: dict[int, _Pending] = {}
        self.modules = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for number, module in enumerate(self.modules):
            module.forward = self._forward_of(module, number)  # type: ignore[method-assign, assignment]

    def _forward_of(self, module: _BatchNorm, number: int) -> Callable[[Tensor], Tensor]:
        plain = module.forward
        meet_forward, meet_backward = (partial(self._meet, place=f"{way} {number}") for way in ("forward", "backward"))

        def forward(x: Tensor) -> Tensor:
            if not (module.training and torch.is_grad_enabled()):
                return plain(x)
            axes = [0, *range(2, x.ndim)]
            exact = x.detach().double()
            size = torch.tensor([exact.numel() / exact.shape[1]], dtype=torch.float64, device=x.device)
            total = meet_forward(torch.cat([exact.sum(axes), (exact * exact).sum(axes), size]))
            count = float(total[-1])
            mean, square = (total[:-1] / count).chunk(2)
            variance = (square - mean * mean).clamp_(min=0)
            self._pending[id(module)] = _Pending(module, mean, variance * (count / max(count - 1, 1)))
            scale = (variance + module.eps).rsqrt()
            computed = torch.promote_types(x.dtype, torch.float32)
            ones = torch.ones_like(mean, dtype=computed)
            weight = module.weight if module.weight is not None else ones
            bias = module.bias if module.bias is not None else torch.zeros_like(ones)
            moved, shrunk = mean.to(computed), scale.to(computed)
            out: Tensor = _Normalise.apply(x, weight, bias, moved, shrunk, count, meet_backward)  # type: ignore[no-untyped-call]
            return out

        return forward

    @torch.no_grad()
    def settle(self) -> None:
        """Move the running statistics once, with the step's own."""
        for pending in self._pending.values():
            module = pending.module
            if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
                continue
            module.num_batches_tracked.add_(1)
            share = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
            module.running_mean.lerp_(pending.mean.to(module.running_mean.dtype), share)
            module.running_var.lerp_(pending.variance.to(module.running_var.dtype), share)
        self._pending.clear()

    def forget(self) -> None:
        """The step in hand is dropped, and its statistics with it."""
        self._pending.clear()

    def restore(self) -> None:
        """Give the modules their own forward pass back. Idempotent."""
        for module in self.modules:
            module.__dict__.pop("forward", None)
