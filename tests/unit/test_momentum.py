# SPDX-License-Identifier: Apache-2.0
"""Momentum means the same for parts of a step as for the whole, and for a late gradient as for one in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from unisono.parallel.momentum import Motion, motion, step_of_part

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "weight decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "maximize": {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
    "never fading": {"momentum": 1.0},
}
RATE = 0.1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"momentum": 0.9, "share": 1.0, "late": 0.0}, Motion(0.9, 1.0, 1.0, 0.0)),  # torch's own
        ({"momentum": 0.9, "share": 1.0, "late": 0.0, "nesterov": True}, Motion(0.9, 1.0, 0.9, 1.0)),  # torch's own
        ({"momentum": 0.9, "share": 1.0, "late": 0.0, "dampening": 0.3}, Motion(0.9, 0.7, 1.0, 0.0)),  # torch's own
        (
            {"momentum": 0.9, "share": 1.0, "late": 1.0},
            Motion(0.9, 0.9, 1.0, 1.0),
        ),  # Nesterov's rule: only velocity is counted otherwise
        ({"momentum": 0.81, "share": 0.5, "late": 0.0}, Motion(0.9, 0.1 / 0.19, 1.0, 0.0)),
        ({"momentum": 0.81, "share": 0.5, "late": 0.5}, Motion(0.9, 0.09 / 0.19, 1.0, 0.1 / 0.19)),
        ({"momentum": 0.5, "share": 1.0, "late": 2.0}, Motion(0.5, 0.25, 1.0, 1.5)),
        ({"momentum": 0.5, "share": 1.0, "late": 1.0, "nesterov": True}, Motion(0.5, 0.5, 0.5, 1.5)),
        ({"momentum": 0.0, "share": 0.5, "late": 0.0}, Motion(0.0, 1.0, 1.0, 0.0)),
        ({"momentum": 1.0, "share": 0.25, "late": 2.0}, Motion(1.0, 0.25, 1.0, 2.0)),
    ],
)
def test_by_what_velocity_and_weights_move(given: dict[str, Any], expected: Motion) -> None:
    found = motion(**given)
    assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("late", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_a_gradient_that_stays_the_same_moves_as_far_whatever_the_share_and_however_late(
    share: float, late: float, nesterov: bool
) -> None:
    how, velocity = motion(0.9, share, late, nesterov=nesterov), 0.0
    for _ in range(int(400 / share)):
        velocity = how.keeps * velocity + how.gains
    assert how.along * velocity + how.ahead == pytest.approx(1 / (1 - 0.9))


class Trained:
    def __init__(self, kind: str) -> None:
        self.weights = nn.Parameter(torch.linspace(-1.0, 1.0, 5))
        self.optimizer = SGD([self.weights], lr=RATE, **KINDS[kind])

    @torch.no_grad()
    def step(self, gradient: Tensor, share: float = 1.0, late: float = 0.0) -> None:
        self.weights.grad, before = gradient, gradient.clone()
        self.optimizer.param_groups[0]["lr"] = RATE * share
        step_of_part(self.optimizer, share, late)
        assert torch.equal(gradient, before), "gradients may lie in somebody else's memory"

    @property
    def velocity(self) -> Tensor:
        found: Tensor = self.optimizer.state[self.weights]["momentum_buffer"]
        return found


def some_gradients(count: int) -> list[Tensor]:
    return [*torch.randn(count, 5, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_step_in_time_is_what_torch_does(kind: str) -> None:
    ours, torchs = Trained(kind), Trained(kind)
    for gradient in some_gradients(5):
        ours.step(gradient)
        torchs.weights.grad = gradient
        torchs.optimizer.step()
    torch.testing.assert_close(ours.weights, torchs.weights)
    states = [list(each.optimizer.state_dict()["state"]) for each in (ours, torchs)]
    assert states[0] == states[1]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.5, 0.25)])
def test_the_parts_of_a_step_leave_the_velocity_of_the_whole(shares: tuple[float, ...]) -> None:
    whole, parts = Trained("momentum"), Trained("momentum")
    for gradient in some_gradients(4):
        whole.step(gradient)
        for share in shares:
            parts.step(gradient, share)
    torch.testing.assert_close(parts.velocity, whole.velocity)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["momentum", "nesterov", "dampening", "never fading"])
def test_a_late_gradient_brings_everything_to_where_it_would_have_been_in_time(kind: str, share: float) -> None:
    first, second, third, fourth = some_gradients(4)
    nothing = torch.zeros(5)
    in_time, late = Trained(kind), Trained(kind)
    for gradient in (first, second + third, fourth, nothing, nothing):
        in_time.step(gradient, share)
    for gradient, delay in ((first, 0), (third, 0), (fourth, 0), (second, 2), (nothing, 0)):
        late.step(gradient, share, delay * share)
    torch.testing.assert_close(late.velocity, in_time.velocity)
    torch.testing.assert_close(late.weights, in_time.weights)
