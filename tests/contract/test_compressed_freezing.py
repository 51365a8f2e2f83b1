# SPDX-License-Identifier: Apache-2.0
"""Parameters frozen and thawed during a training whose gradients are compressed: other buckets, nothing lost."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import together
from torch import Tensor, nn

from unisono.comm.seam import Comm
from unisono.core.membership import even
from unisono.core.spec import JobSpec
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.strategy import Microbatch
from unisono.train.adding import Adding

M = 4
# Lengths that are no multiples of a cache line, so that there is something between the parameters of a bucket.
NETWORK = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 61), nn.Tanh(), nn.Linear(61, 33))
INPUTS = torch.randn(3, M, 4, 12, generator=torch.Generator().manual_seed(2))


def train(comm: Comm, workers: int, compress: str, optimized: slice) -> list[dict[str, Tensor]]:
    """The gradients of a step with all parameters, one with the last layer frozen, and one with all again.

    `optimized`: the layers that the optimizer has.
    """
    model = copy.deepcopy(NETWORK)
    spec = JobSpec(microbatches=M, batch_size=M, seed=0, threads=1, compress=compress)
    adding = Adding("direct", spec, model, torch.device("cpu"), lambda _: None)
    sgd = torch.optim.SGD(model[optimized].parameters(), lr=0.0)
    strategy = AllReduce(model, sgd, comm, make_reducer=adding, carry=adding.carry)
    adding.carried, adding.shapes_of = strategy.carried, strategy.shapes
    members, seen = even(1, tuple(range(workers)), M), []
    strategy.configure(members)
    for step in range(3):
        for parameter in model[4].parameters():
            parameter.requires_grad_(step != 1)
        strategy.begin_step([1 / M] * M)
        for index in members.ranges[comm.rank]:
            batch = INPUTS[step, index]
            strategy.forward_backward(
                Microbatch(step, index, 1 / M), lambda batch=batch: (model(batch) - 1).square().mean()
            )
        strategy.step(strategy.reduce([]).loss, lambda: 0.0)
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    strategy.close()
    return seen


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("compress", ["bf16", "int8", "auto"])
@pytest.mark.parametrize("optimized", [slice(0, 5), slice(0, 4)])
def test_every_gradient_arrives_whatever_was_frozen_before(compress: str, workers: int, optimized: slice) -> None:
    members = even(1, tuple(range(workers)), M)
    found, expected = (
        together("threads", workers, lambda comm, text=text: train(comm, workers, text, optimized), membership=members)[
            0
        ]
        for text in (compress, "none")
    )
    most = 0.4 if compress == "auto" else 0.05  # it may have chosen four bits; what was lost would be half
    for step, (some, whole) in enumerate(zip(found, expected, strict=True)):
        assert some.keys() == whole.keys()
        assert len(some) == (4 if step == 1 else 6), "what the optimizer does not have is frozen all the same"
        for name, gradient in some.items():
            assert (gradient - whole[name]).norm() < most * whole[name].norm(), (step, name)
