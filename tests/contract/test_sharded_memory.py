# SPDX-License-Identifier: Apache-2.0
"""What fsdp ranks hold and for how long: whole parameters one unit at a time, gradients one unit at a time."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import on_every_rank

from unisono.parallel.materialise import Maker
from unisono.parallel.sharded import shard
from unisono.parallel.shards import Shards

LAYERS = 5


def whole_at_once() -> int:
    """The most blocks whose whole parameters were there at the same time, while a model was made and cut."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    maker = Maker(model, torch.device("cpu"), lambda _: None)
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def make(part: nn.Module) -> None:
        nonlocal most
        maker.make(part)
        if isinstance(part, nn.Linear):
            made.append(weakref.ref(part.weight))
            most = max(most, sum(one() is not None for one in made))

    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), make=make)
    return most


def test_a_model_on_the_meta_device_never_materialises_whole() -> None:
    assert on_every_rank(2, whole_at_once) == [1, 1]


def gradients_at_once() -> tuple[int, list[str], dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    shards = Shards(model)
    told: dict[str, Tensor] = {}
    order: list[str] = []
    most = 0

    def take(name: str, gradient: Tensor) -> None:
        nonlocal most
        most = max(most, 1 + sum(parameter.grad is not None for parameter in shards.real.values()))
        told[name] = gradient.clone()
        order.append(name)

    shards.tell_gradients(take)
    model(torch.ones(2, 8)).sum().backward()
    left = [name for name, gradient in shards.gradients() if gradient is not None]
    return most, order, {name: shards.whole(name, gradient) for name, gradient in told.items()}, left


def test_a_gradient_is_told_when_its_unit_is_through_and_is_the_right_one() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    alone(torch.ones(2, 8)).sum().backward()
    for most, order, told, left in on_every_rank(2, gradients_at_once):
        assert most <= 2, "weight and bias of one layer"
        assert [name.split(".")[0] for name in order[::2]] == [str(layer) for layer in reversed(range(LAYERS))]
        assert left == []
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(told[name], parameter.grad * 2)  # the sum over two ranks, which see the same


def test_a_frozen_parameter_tells_nothing_and_a_thawed_one_is_found_afterwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    shards, told = Shards(model), []
    shards.tell_gradients(lambda name, _: told.append(name))
    model[0].bias.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    assert sorted(told) == ["1.bias", "1.weight"]
    assert [name for name, gradient in shards.gradients() if gradient is not None] == ["0.bias"]
