# SPDX-License-Identifier: Apache-2.0
"""A device's memory by what it is used for, before and during a training; and what must be recomputed for it to fit.

Pure: sizes in, decisions out. What is measured comes from `metering`, what is done when it is not enough from
`remedies`. Activations are estimated from the linear layers alone, which is where nearly all of them are in the models
that outgrow a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from unisono.core.mesh import Mesh
from unisono.core.mesh_choice import Needs, held
from unisono.core.spec import Workers
from unisono.train.blocks import repeated_blocks

USABLE = 0.9  # of a device: the rest is fragments, kernels and their workspace
WHOLE, ONE = Mesh(), Workers(min=1, max=1)


@dataclass(frozen=True)
class Activations:
    """Estimated bytes of one microbatch on one rank, by what is recomputed; `scores`: the outputs of layers outside of
    blocks."""

    none: int
    selective: int
    full: int
    scores: int

    def of(self, recompute: str) -> int:
        return {"none": self.none, "selective": self.selective, "full": self.full}[recompute] + self.scores


def rows_of(batch_size: int, microbatches: int, tokens: int, mesh: Mesh = WHOLE) -> int:
    """Vectors of a microbatch that go through a linear layer of one rank: its tokens, or samples. `tokens` of a sample;
    0: it is not made of any."""
    samples = -(-batch_size // microbatches)
    return -(-samples // mesh.fsdp) * (tokens or 1)


def estimate(model: nn.Module, rows: int, element_bytes: int, mesh: Mesh = WHOLE) -> Activations:
    """Of a model that has not been cut yet, for a rank of `mesh`.

    A layer keeps its input, and what follows it keeps its output. ``selective`` keeps outputs alone; ``full`` keeps
    what enters each block, and all of one block while that is computed again. Stages of a pipeline share the blocks,
    with all chunks of a microbatch under way; the last has the outputs. With tp, what is as wide as what enters its
    block is taken to be whole on every rank.
    """
    blocks = repeated_blocks(model)
    per_block = [[layer for layer in block.modules() if isinstance(layer, nn.Linear)] for _, block in blocks]
    inside = {id(layer) for layers in per_block for layer in layers}
    outside = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    inputs = [sum(_shared(layer.in_features, layers, mesh) for layer in layers) for layers in per_block]
    products = [sum(_shared(layer.out_features, layers, mesh) for layer in layers) for layers in per_block]
    both = [taken + given for taken, given in zip(inputs, products, strict=True)]
    entering = sum(layers[0].in_features for layers in per_block if layers)
    scores = sum(layer.in_features + 2 * layer.out_features for layer in outside)
    each = rows * element_bytes
    return Activations(
        -(-sum(both) // mesh.pp) * each,
        -(-sum(products) // mesh.pp) * each,
        (-(-entering // mesh.pp) + max(both, default=0)) * each,
        scores * each,
    )


def _shared(width: int, layers: list[nn.Linear], mesh: Mesh) -> int:
    return width if width == layers[0].in_features else -(-width // mesh.tp)


@dataclass(frozen=True)
class Setting:
    """Of a training, what its memory depends on, as it is known before the model is cut."""

    needs: Needs  # with the number of microbatches that was settled on
    recompute: str
    precision: str
    estimated: Activations | None  # for the mesh in hand; None where it cannot be
    mesh: Mesh = WHOLE
    workers: Workers = ONE  # replicas
    host_is_apart: bool = True  # what is offloaded does not count
    larger: tuple[Mesh, ...] = ()  # meshes into which the model could be cut instead
    devices: int = 1  # of this machine

    @property
    def microbatches(self) -> int:
        return self.needs.microbatches or 1

    def state(self, mesh: Mesh | None = None, **changes: Any) -> float:
        """Bytes on a rank's device besides activations, with another mesh or other needs if so. The fewer replicas, the
        more partial sums."""
        needs, mesh = replace(self.needs, **changes), mesh or self.mesh
        parts, together = held(needs, mesh, min(self.workers.min, self.replicas_with(mesh)))
        return together if needs.offload and self.host_is_apart else parts + together

    def replicas_with(self, mesh: Mesh) -> int:
        """As many as now, or as this machine has devices for."""
        return self.workers.max if mesh == self.mesh else max(1, min(self.workers.max, self.devices // mesh.ranks))


def share_of_machine(machine_bytes: int, workers: int, mesh: Mesh) -> int:
    """Of one rank, where the ranks of all this machine's workers compute in its memory."""
    return machine_bytes // (workers * mesh.ranks)


def choose_recompute(setting: Setting, capacity: int) -> str:
    """The least that makes it fit into a rank's memory; ``full`` also when nothing does."""
    assert setting.estimated is not None
    state, activations = setting.state(), setting.estimated
    fitting = (how for how in ("none", "selective") if state + activations.of(how) <= USABLE * capacity)
    return next(fitting, "full")


@dataclass(frozen=True)
class Usage:
    """Bytes by category, as measured; `capacity` is the device's."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    capacity: int

    def categories(self) -> dict[str, int]:
        names = ("parameters", "gradients", "optimizer", "activations", "other")
        return {name: getattr(self, name) for name in names}

    @property
    def largest(self) -> str:
        sizes = self.categories()
        return max(sizes, key=lambda name: sizes[name])
