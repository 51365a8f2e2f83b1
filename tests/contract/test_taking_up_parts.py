# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of whole tensors is taken up by ranks that hold parts: the right parts, and never two whole tensors."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import on_every_rank

from unisono.checkpoint.chunks import plan_chunks
from unisono.checkpoint.commit import commit
from unisono.checkpoint.listing import newest_good
from unisono.checkpoint.naming import by_name, names_in_order
from unisono.checkpoint.parts import write_part
from unisono.checkpoint.specs import specs_of
from unisono.checkpoint.store import open_store
from unisono.comm import state_tree
from unisono.comm.inner import World
from unisono.core.mesh import parse_mesh
from unisono.parallel.sharded import shard
from unisono.parallel.shards import Shards, point_optimizer_at
from unisono.train.resuming import state_of
from unisono.train.spread import Spread, Whole

LAYERS, WIDTH = 5, 300  # large enough for a chunk of its own


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(url: str) -> dict[str, Tensor]:
    """As a run of one rank does."""
    model, optimizer = trained()
    tree, tensors = state_tree.named(
        {
            "model": model.state_dict(),
            "optimizer": by_name(optimizer.state_dict(), names_in_order(model, optimizer)),
            "trainable": [True] * len(list(model.parameters())),
            "modes": [True] * len(list(model.modules())),
            "own": {"noise": torch.arange(7.0)},
        }
    )
    store, specs = open_store(url), specs_of(tensors)
    commit(store, 1, specs, [write_part(store, plan_chunks(specs), tensors)], {"tree": tree})
    return tensors


def take_up(url: str) -> tuple[int, dict[str, Tensor], Any]:
    """The most whole tensors that were there at the same time; what the ranks have together; and what is nobody's."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    whole, world = Whole(model, optimizer), World()
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    shards = Shards(model)
    point_optimizer_at(optimizer, whole.names, shards)
    spread = Spread(whole, shards, optimizer, parse_mesh(f"fsdp={dist.get_world_size()}"), world)
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    def keep(place: tuple[Any, ...], tensor: Tensor) -> Tensor:
        nonlocal most
        if tensor.numel() == WIDTH * WIDTH:
            seen.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in seen))
        return spread.keep(place, tensor)

    store = open_store(url)
    manifest = newest_good(store)
    assert manifest is not None
    state = spread.cut(state_of(store, manifest, None, keep))
    shards.shadow.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert len(seen) == 3 * LAYERS
    return most, spread.weights() | _moments(spread), state["own"]["noise"]


def _moments(spread: Spread) -> dict[str, Tensor]:
    state = spread.optimizer_by_name()["state"]
    return {f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}


def test_ranks_take_up_their_parts_of_one_whole_tensor_after_the_other(tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    saved = save(url)
    expected = {name.split(".", 1 if name.startswith("model.") else 2)[-1]: value for name, value in saved.items()}
    first, second = on_every_rank(2, take_up, url)
    for most, _, own in (first, second):
        assert most == 1
        assert torch.equal(own, saved["own.noise"])
    found = first[1]
    assert found.keys() == expected.keys() - {"noise", "own.noise"}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
