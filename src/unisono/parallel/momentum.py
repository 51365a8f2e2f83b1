# SPDX-License-Identifier: Apache-2.0
"""What momentum means where an update is made of a part of a step, and of a gradient that comes late.

Everything is counted in steps. Velocity fades by `momentum` in a step, so by its power in a part of one. A gradient
that is late has missed the steps in which its velocity would have moved the weights: it makes up for them, and its
velocity has faded by as much (spike compensation: Kosson et al. 2021, where all are equally late; one step late is
Nesterov's rule). SGD only, and pure but for `step_of_part`, which `slice_optimizer` calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import SGD


@dataclass(frozen=True)
class Motion:
    """velocity = keeps * velocity + gains * gradient; weights -= rate * (along * velocity + ahead * gradient)"""

    keeps: float
    gains: float
    along: float
    ahead: float


def motion(momentum: float, share: float, late: float, dampening: float = 0.0, nesterov: bool = False) -> Motion:
    """For an update of this `share` of a step, `late` by so many steps: velocity and weights become what they would be
    if it had come in time. A gradient that stays the same moves the weights by rate * share / (1 - momentum), whatever
    the share and however late. Nesterov's look ahead is one step more."""
    behind, along = late + nesterov, momentum if nesterov else 1.0
    if momentum == 1.0:  # nothing fades
        return Motion(1.0, (1.0 - dampening) * share, along, (1.0 - dampening) * behind)
    keeps, gain = momentum**share, (1.0 - dampening) / (1.0 - momentum)
    return Motion(keeps, gain * (1.0 - keeps) * momentum**late, along, gain * (1.0 - momentum**behind))


def step_of_part(optimizer: SGD, share: float, late: float) -> None:
    """What `optimizer.step()` does, for a part of a step; the learning rates are those of the part already. A parameter
    without a gradient is left alone, and gradients stay as they are. Called without autograd."""
    for group in optimizer.param_groups:
        rate, momentum = float(group["lr"]), group["momentum"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.neg() if group["maximize"] else parameter.grad
            if group["weight_decay"]:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            if not momentum:
                parameter.add_(gradient, alpha=-rate)
                continue
            state = optimizer.state[parameter]
            velocity = state.get("momentum_buffer")
            dampening = 0.0 if velocity is None else group["dampening"]  # torch has none for the first gradient
            how = motion(momentum, share, late, dampening, group["nesterov"])
            if velocity is None:
                velocity = state["momentum_buffer"] = gradient * how.gains
            else:
                velocity.mul_(how.keeps).add_(gradient, alpha=how.gains)
            parameter.add_(velocity, alpha=-rate * how.along)
            if how.ahead:
                parameter.add_(gradient, alpha=-rate * how.ahead)
