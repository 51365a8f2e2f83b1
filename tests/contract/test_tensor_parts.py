# SPDX-License-Identifier: Apache-2.0
"""What each rank holds, with tensor parallelism alone and under FSDP2: parts, whole tensors, norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from worlds import on_every_rank

from tensor_models import batch, build, loss_of
from unisono.comm.inner import World
from unisono.core.mesh import Mesh
from unisono.parallel.grouped import Group
from unisono.parallel.shards import Shards
from unisono.parallel.tensor import apply
from unisono.parallel.tensor_parts import (
    Part,
    gather_full,
    parts_of,
    window,
)
from unisono.parallel.tensor_plan import TensorPlan, plan_for

STEPS, TOLERANCE = 4, 1e-10
NAMES = ("llama", "gpt2", "encoder")
Held = list[tuple[Part, torch.Tensor]]


def train(model: nn.Module, share: slice) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        loss_of(model, tokens[share], targets[share]).backward()
        optimizer.step()


def cut(name: str, fsdp: int, tp: int) -> tuple[nn.Module, TensorPlan, DeviceMesh]:
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    model = build(name, dropout=0.0)
    plan = plan_for(model, tp)
    apply(model, plan, mesh["tp"]).cut(model)
    if fsdp > 1:
        for block in (block for stack in plan.stacks for block in stack):
            fully_shard(model.get_submodule(block), mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    return model, plan, mesh


def holdings(name: str, fsdp: int, tp: int) -> dict[str, Any]:
    model, plan, mesh = cut(name, fsdp, tp)
    here = mesh["fsdp"].get_local_rank() if fsdp > 1 else 0
    train(model, slice(here * 4 // fsdp, (here + 1) * 4 // fsdp))
    held: Held = []
    for n, p in model.named_parameters():
        local = p.to_local()
        held += [
            (part, window(local, part.at, part.sizes).detach().clone())
            for part in parts_of(n, p, plan.cuts.get(n), plan.ways)
        ]
    shards = Shards(model, plan.cuts, plan.ways)
    for n, gradient in shards.gradients():
        shards.local[n].grad = gradient
    norm = Group(Mesh(fsdp=fsdp, tp=tp), World(), shards).norm() ** 2
    full = {n: gather_full(p, plan.cuts.get(n), plan.ways) for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in shards.local.values():
            p.zero_()
        for n, p in shards.local.items():
            p.copy_(shards.part(n, full[n]))
    again = {n: shards.whole(n, p) for n, p in shards.local.items()}
    return {"held": held, "norm": norm, "full": full, "again": again, "alike": shards.alike}


def put_together(ranks: list[Held]) -> dict[str, torch.Tensor]:
    """The model's tensors from the parts of all ranks; every element must be there, and copies must be equal."""
    tensors: dict[str, torch.Tensor] = {}
    for held in ranks:
        for part, values in held:
            tensor = tensors.setdefault(part.name, torch.full(part.shape, float("nan"), dtype=torch.float64))
            place = window(tensor, part.offsets, part.sizes)
            assert torch.equal(torch.where(place.isnan(), values, place), values)
            place.copy_(values)
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def held_twice(ranks: list[Held]) -> set[str]:
    places = [(part.name, *part.offsets) for held in ranks for part, values in held if values.numel()]
    return {place[0] for place in places if places.count(place) > 1}


@pytest.mark.parametrize(("fsdp", "tp"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_all_ranks_are_the_model_of_one_process(name: str, fsdp: int, tp: int) -> None:
    model = build(name, dropout=0.0)
    train(model, slice(0, 4))
    norm = sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None)
    ranks = on_every_rank(fsdp * tp, holdings, name, fsdp, tp)
    together = put_together([rank["held"] for rank in ranks])
    for n, p in model.named_parameters():
        torch.testing.assert_close(together[n], p.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    for rank in ranks:
        assert rank["alike"] == held_twice([rank["held"] for rank in ranks])
        assert rank["norm"] == ranks[0]["norm"]
        assert rank["norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert all(torch.equal(rank["full"][n], tensor) for n, tensor in together.items())
        assert all(torch.equal(rank["again"][n], tensor) for n, tensor in together.items())
