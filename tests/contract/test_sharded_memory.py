# SPDX-License-Identifier: Apache-2.0
"""What fsdp ranks hold and for how long: whole parameters one unit at a time, gradients one unit at a time."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from worlds import on_every_rank

from unisono.parallel.materialise import Maker
from unisono.parallel.sharded import PartByPart, shard
from unisono.parallel.shards import Shards
from unisono.parallel.units import layers_in

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


class Watched(nn.Linear):
    """Notes how many elements of the whole model are there while it computes, either way."""

    seen: ClassVar[list[int]] = []
    root: ClassVar[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        outputs = super().forward(x)
        outputs.register_hook(lambda _: self.look())
        return outputs

    def look(self) -> None:
        there = [p for p in Watched.root.parameters() if not isinstance(p, DTensor)]
        Watched.seen.append(sum(p.numel() for p in there))


def whole_while_computing(unit: str) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(8), Watched(8, 32), nn.ReLU(), Watched(32, 8)) for _ in range(3)]
    model = Watched.root = nn.Sequential(*blocks)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), unit=unit)
    shards, told = Shards(model), {}
    shards.tell_gradients(lambda name, gradient: told.update({name: gradient.clone()}))
    model(torch.ones(2, 8)).square().sum().backward()
    return max(Watched.seen), [shards.whole(name, gradient) for name, gradient in sorted(told.items())]


def by_block_and_by_layer() -> tuple[int, int, bool]:
    block, first = whole_while_computing("block")
    Watched.seen.clear()
    layer, second = whole_while_computing("layer")
    return block, layer, all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_layers_as_units_are_whole_one_at_a_time_with_the_same_bits() -> None:
    norm, up, down = 16, 8 * 32 + 32, 32 * 8 + 8
    assert on_every_rank(2, by_block_and_by_layer) == [(norm + up + down, norm + max(up, down), True)] * 2


def test_a_layer_whose_parent_reads_its_weights_is_no_unit() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16)
    assert layers_in(block) == ["self_attn", "linear1", "linear2"]


def added_part_by_part() -> tuple[list[float], int]:
    rank = dist.get_rank()
    sent = torch.arange(6, dtype=torch.float32) + 10 ** (rank + 1)
    mine = torch.empty(2)
    PartByPart()(mine, sent, dist.group.WORLD, dist.ReduceOp.SUM)
    return mine.tolist(), sent.untyped_storage().nbytes()


def test_every_rank_gets_its_part_of_the_sum_and_what_was_sent_is_freed() -> None:
    assert on_every_rank(3, added_part_by_part) == [([1110.0, 1113.0], 0), ([1116.0, 1119.0], 0), ([1122.0, 1125.0], 0)]
