# SPDX-License-Identifier: Apache-2.0
"""What is there while a model is cut over tensors, stages and shards: on the host a layer, on the device a part."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import on_every_rank

from unisono.core.mesh import INNER, Mesh
from unisono.parallel.materialise import Maker
from unisono.train.cutting import Cut, decide
from unisono.train.options import Parallel

BLOCKS, WIDTH = 6, 32
MESHES = [Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(pp=2, tp=2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear1, self.linear2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear2(self.linear1(self.norm(x)).relu())


def build(on: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(on):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


class Noting(Maker):
    """Counts how many of the matrices that it has made are there whole, at the worst moment."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.device("cpu"), lambda name: torch.manual_seed(sum(map(ord, name))))
        self.seen: list[weakref.ref[Tensor]] = []
        self.made = self.most = 0

    def make_own(self, module: nn.Module) -> None:
        super().make_own(module)
        if isinstance(module, nn.Linear) and not isinstance(module.weight, DTensor):
            self.seen.append(weakref.ref(module.weight))
            self.made += 1
            self.most = max(self.most, sum(one() is not None for one in self.seen))


def cut(model: nn.Module, maker: Maker, mesh: Mesh, device: str) -> Cut:
    cutting = decide(model, mesh, Parallel(), 4, torch.ones(1, WIDTH))
    meshes = init_device_mesh("cpu", mesh.shape, mesh_dim_names=INNER)
    loss: Any = nn.functional.mse_loss
    return cutting.carry_out(model, meshes, torch.device(device), maker, loss, contextlib.nullcontext)


def made_on_the_host(mesh: Mesh) -> tuple[int, int, dict[str, Tensor]]:
    model = build("meta")
    maker = Noting(model)
    shards = cut(model, maker, mesh, "cpu").shards
    return maker.most, maker.made, {name: shards.whole(name, local) for name, local in shards.local.items()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_on_the_meta_device_is_made_and_cut_one_module_at_a_time_with_the_values_of_one_process(
    mesh: Mesh,
) -> None:
    alone = build("meta")
    Noting(alone).make(alone)
    expected, held = dict(alone.named_parameters()), set()
    for most, made, whole in on_every_rank(mesh.ranks, made_on_the_host, mesh):
        assert most == 1
        assert made == 2 * BLOCKS / mesh.pp, "nothing that belongs to another stage"
        assert all(torch.equal(value, expected[name]) for name, value in whole.items())
        held |= set(whole)
    assert held == set(expected)


class Idle(Maker):
    """For a model that has its values, on a device that says of itself that it has none."""

    def make_own(self, module: nn.Module) -> None:
        pass


class OnDevice(TorchDispatchMode):
    """Bytes on the meta device, which stands for one that is not the host, at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.there: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.there.append(weakref.ref(tensor._local_tensor if isinstance(tensor, DTensor) else tensor))
        alive = [tensor for tensor in (one() for one in self.there) if tensor is not None]
        storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in alive)}
        self.most = max(self.most, sum(storages.values()))
        return out


def arrived_on_the_device(mesh: Mesh) -> int:
    model = build("cpu")
    with OnDevice() as device:
        kept = cut(model, Idle(model, torch.device("cpu"), lambda _: None), mesh, "meta")
    assert all(local.is_meta for local in kept.shards.local.values())
    assert mesh.fsdp > 1 or all(buffer.is_meta for buffer in kept.model.buffers())
    return device.most


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_only_parts_of_a_model_in_the_hosts_memory_go_to_the_device(mesh: Mesh) -> None:
    block = 4 * sum(parameter.numel() for parameter in build("cpu")[0].parameters())
    parts = BLOCKS * block / (mesh.fsdp * mesh.tp)
    whole_on_every_rank = BLOCKS * 4 * 3 * WIDTH  # norms, and biases of what is cut by rows
    unit = block if mesh.fsdp > 1 else 0
    for most in on_every_rank(mesh.ranks, arrived_on_the_device, mesh):
        assert parts / 2 < most <= parts + whole_on_every_rank + unit


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.lm_head = nn.Embedding(48, WIDTH), Block(), nn.Linear(WIDTH, 48, bias=False)
        self.lm_head.weight = self.embed.weight


def tied(fsdp: int) -> tuple[bool, Tensor]:
    with torch.device("meta"):
        model = Tied()
    shards = cut(model, Noting(model), Mesh(fsdp=fsdp, tp=2), "cpu").shards
    return model.lm_head.weight is model.embed.weight, shards.whole("embed.weight", shards.local["embed.weight"])


@pytest.mark.parametrize("fsdp", [1, 2])
def test_what_is_tied_stays_tied_when_it_is_made_and_cut_module_by_module(fsdp: int) -> None:
    with torch.device("meta"):
        alone = Tied()
    Noting(alone).make(alone)
    for is_one, whole in on_every_rank(2 * fsdp, tied, fsdp):
        assert is_one
        assert torch.equal(whole, alone.embed.weight)
