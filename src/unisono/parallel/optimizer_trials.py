# SPDX-License-Identifier: Apache-2.0
"""What kind of optimizer the user's is, found out by trying it on small matrices.

Whether it can be cut into slices, what it keeps, whether it only reads gradients, how its steps follow the learning
rate. Never touches the user's own: `like` makes another of the same kind. Called by strategies with servers, by meshes
and by the probe.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer

from unisono.core.errors import SetupError

_TRIAL_STEPS = 3
_PACE_STEPS = 20  # some warm up


def like(optimizer: Optimizer) -> Optimizer:
    """Another one of the same kind, for other parameters: without state, and none of what schedules hang on it."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)  # which copy.copy would leave out
    other.__dict__.pop("step", None)  # a schedule counts the steps of the user's own
    other.state = defaultdict(dict)
    other.param_groups = []
    return other


def keeps_state(optimizer: Optimizer, tables: Collection[int] = frozenset()) -> bool:
    """Whether it remembers anything from step to step. Raises for those that cannot be cut: two parts of a small matrix
    must go the same way as the whole does. Parameters that are `tables`, by identity, are for `keeps_rows`."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _refusal(name, "it evaluates the loss several times a step")
    seeded = torch.Generator().manual_seed(0)
    start = torch.randn(9, 30, generator=seeded)
    gradients = [torch.randn(9, 30, generator=seeded) for _ in range(_TRIAL_STEPS)]
    keeps = False
    for group in _dense_groups(optimizer, tables):
        try:
            whole, state, _ = trial(optimizer, group, [start.clone()], [[gradient] for gradient in gradients])
            parts, _, _ = trial(
                optimizer,
                group,
                [start.view(-1)[:64].clone(), start.view(-1)[64:].clone()],
                [[gradient.view(-1)[:64], gradient.view(-1)[64:]] for gradient in gradients],
            )
        except Exception as error:
            raise _refusal(name, f"it does not take vectors: {error}") from None
        if not torch.equal(torch.cat([part.view(-1) for part in whole]), torch.cat(parts)):
            raise _refusal(name, "what it does to one element depends on the others of its parameter")
        keeps |= any(state)
    return keeps


def _dense_groups(optimizer: Optimizer, tables: Collection[int]) -> list[dict[str, Any]]:
    """Those that have something to do with dense gradients."""
    return [
        group for group in optimizer.param_groups
        if not tables or any(id(parameter) not in tables for parameter in group["params"])
    ]  # fmt: skip


def leaves_gradients(optimizer: Optimizer, tables: Collection[int] = frozenset()) -> bool:
    """Whether it only reads gradients, so that they may lie in somebody else's memory. Of PyTorch's own we find out by
    trying; what others do may depend on the numbers, and a write to such memory would end the process."""
    if type(optimizer).__module__.partition(".")[0] != "torch" or has_hooks(optimizer):
        return False
    gradients = [[torch.linspace(-1.0, 1.0, 64)] for _ in range(_TRIAL_STEPS)]
    groups = _dense_groups(optimizer, tables)
    return all(trial(optimizer, group, [torch.ones(64)], gradients)[2] for group in groups)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether something else is done with every step: nobody knows what."""
    everywhere = (_torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks)
    return any((optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *everywhere))


def state_bytes(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> int:
    """What it keeps for each element of a large matrix of that dtype. Raises whatever the trial does."""
    start = torch.zeros(64, 64, dtype=dtype)
    _, (state,), _ = trial(optimizer, group, [start], [[torch.ones_like(start)]])
    kept = [value for value in state.values() if isinstance(value, Tensor) and value.numel() == start.numel()]
    return sum(value.element_size() for value in kept)


def pace_of(optimizer: Optimizer, tables: Collection[int] = frozenset()) -> Callable[[float], float]:
    """How the learning rate follows the size of a batch, for this kind of optimizer, so that several small updates go
    about as far as a large one: in proportion; or with the square root, where the gradient's size makes no difference
    and a small batch's noise is divided out along with it (Malladi et al. 2022)."""
    start, gradient = torch.zeros(8, 8), torch.ones(8, 8)
    if not _dense_groups(optimizer, tables):
        gradient = gradient.to_sparse(1)
    once, _, _ = trial(optimizer, optimizer.param_groups[0], [start.clone()], [[gradient]] * _PACE_STEPS)
    more, _, _ = trial(optimizer, optimizer.param_groups[0], [start.clone()], [[10 * gradient]] * _PACE_STEPS)
    moved, moved_more = float(once[0].abs().sum()), float(more[0].abs().sum())
    return math.sqrt if moved_more < 5 * moved else float


def trial(
    optimizer: Optimizer, group: dict[str, Any], starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[dict[str, Any]], bool]:
    """The parts after some steps, what the optimizer then keeps for each, and whether it left the gradients alone."""
    other = like(optimizer)
    parts = [nn.Parameter(start) for start in starts]
    other.param_groups = [{**group, "params": parts}]
    with contextlib.suppress(Exception):  # some make their state at once, if they can be made from their settings
        other.state.update(type(optimizer)([{**group, "params": parts}], **optimizer.defaults).state)
    left = True
    for row in gradients:
        given = [gradient.clone() for gradient in row]
        for part, gradient in zip(parts, given, strict=True):
            part.grad = gradient
        other.step()
        left &= all(torch.equal(_values(now), _values(before)) for now, before in zip(given, row, strict=True))
    return [part.detach() for part in parts], [other.state[part] for part in parts], left


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _refusal(name: str, cause: str) -> SetupError:
    return SetupError(
        f"{name} cannot run on parameter servers",
        cause=cause,
        do="use an optimizer that works element by element, such as SGD or AdamW; or leave out --strategy ps",
    )
