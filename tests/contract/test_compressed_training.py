# SPDX-License-Identifier: Apache-2.0
"""Compression inside the strategy: real backward passes, real buckets, the same weights on any number of workers."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import together
from torch import Tensor, nn

from unisono.comm.codecs import parse_codec
from unisono.comm.reducers import compressing
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.core.membership import Membership, even
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.layout import ParameterInfo, pack
from unisono.parallel.strategy import Microbatch

M, STEPS = 5, 4


NETWORK = nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 3))


def train(comm: Comm, members: Membership, text: str) -> dict[str, Tensor]:
    model = copy.deepcopy(NETWORK)
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    layout = pack(ParameterInfo(name, p.numel(), p.element_size(), f"{p.dtype} {p.device}") for name, p in named)
    compression = parse_codec(text)

    def shapes(bucket: int) -> list[tuple[int, tuple[int, ...]]]:
        return [(layout.slots[i].start, tuple(named[i][1].shape)) for i in layout.members(bucket)]

    def make(comm: Comm, membership: Membership) -> Reducer:
        return compressing.make(compression, comm, membership, 5, strategy.carried, shapes)

    carry = compressing.fresh(compression, layout.bucket_elements, M, shapes, torch.device("cpu"))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = AllReduce(model, sgd, comm, make_reducer=make, carry=carry)
    strategy.configure(members)
    inputs = torch.randn(STEPS, M, 4, 12, generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        strategy.begin_step([1 / M] * M)
        for index in members.ranges[comm.rank]:
            batch = inputs[step, index]
            strategy.forward_backward(
                Microbatch(step, index, 1 / M), lambda batch=batch: (model(batch) - batch[:, :3].sin()).square().mean()
            )
        strategy.step(strategy.reduce([]).loss, lambda: 0.0)
    strategy.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "text", ["fp16", "int8:stochastic", "int4", "onebit", "topk:0.05", "randomk:0.1", "powersgd:2"]
)
def test_any_number_of_workers_trains_the_same_weights(text: str) -> None:
    def weights_of(workers: int) -> list[dict[str, Tensor]]:
        members = even(1, tuple(range(workers)), M)
        return together("threads", workers, lambda comm: train(comm, members, text), membership=members)

    (alone,) = weights_of(1)
    assert not any(torch.equal(alone[f"{layer}.weight"], NETWORK[layer].weight) for layer in (0, 2, 4))
    for workers in (2, 3, 5):
        for weights in weights_of(workers):
            assert all(torch.equal(tensor, alone[name]) for name, tensor in weights.items())
