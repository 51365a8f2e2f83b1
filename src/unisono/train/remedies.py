# SPDX-License-Identifier: Apache-2.0
"""What to do when a device's memory is not enough: remedies as data, with what each is estimated to save and to cost.

Pure: what was held by category and what the training is, in; an ordered list, out. What a mesh would save is counted as
``--mesh auto`` counts it (`core.mesh_choice`). Called by `settling` when an allocation has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.core.errors import DeviceMemory
from unisono.core.mesh import INNER, Mesh
from unisono.core.mesh_choice import gradient_copies, held
from unisono.train.memory import USABLE, Setting, Usage

SHOWN = 3
LEAST = 0.01  # of what is held: less is not worth a line
STATE = ("parameters", "gradients", "optimizer")
INSIDE = ("activations",)
_FUSED = 0.9  # of the scores and their gradient, that are gone when they are made in chunks
# What orders them: shares of a step's time. Those of recomputation are near what benchmarks show; those of a mesh
# depend on the devices and their links, so they are in no sentence.
_ZERO, _FSDP, _PP, _TP, _OFFLOAD = 0.1, 0.15, 0.2, 0.25, 1.0
_RECOMPUTING = {"selective": 0.05, "full": 0.33}
_MICROBATCHES = 0.02


@dataclass(frozen=True)
class Remedy:
    saves: int  # bytes of one device, estimated
    price: float  # share of the step's time, for the order
    text: str
    cost: str  # in words
    of: tuple[str, ...]  # categories of which it takes away


def remedies(usage: Usage, setting: Setting) -> list[Remedy]:
    """All that would help: first those for what holds most, and of these the cheapest first."""
    activations = max(0, usage.activations - _among_activations(setting))
    found = [*_fewer_activations(activations, setting), *_more_ranks(usage, activations, setting)]
    least = LEAST * sum(usage.categories().values())
    helping = [remedy for remedy in found if remedy.saves > least]
    return sorted(helping, key=lambda remedy: (usage.largest not in remedy.of, remedy.price))


def _among_activations(setting: Setting) -> int:
    """What is measured as activations and is none: blocks that are whole for a moment, and further partial sums."""
    needs, replicas = setting.needs, setting.workers.min
    _, together = held(needs, setting.mesh, replicas)
    sums = gradient_copies(-(-setting.microbatches // replicas)) - 1
    away = needs.offload and setting.host_is_apart
    return int(together + (0 if away else sums * needs.gradients / setting.mesh.ranks))


def _fewer_activations(activations: int, setting: Setting) -> Iterator[Remedy]:
    estimated, mesh, now = setting.estimated, setting.mesh, setting.microbatches
    if setting.precision == "fp32":
        text = '--precision bf16 (or Trainer(precision="bf16"))'
        yield Remedy(activations // 2, -0.5, text, "and is faster", INSIDE)
    if estimated is not None and mesh.pp == 1:  # stages take the model's outputs
        share = estimated.scores / max(1, estimated.of(setting.recompute))
        if share > 0.25:
            text = "unisono.nn.LinearCrossEntropy for the output layer"
            yield Remedy(int(activations * share * _FUSED), 0.0, text, "at no cost in time", INSIDE)
    more = min(setting.needs.batch_size // (mesh.fsdp * mesh.pp), 2 * now)
    if more > now:
        sums = setting.state(microbatches=more) - setting.state()
        text = f"--microbatches {more} (this changes the bits)"
        yield Remedy(int(activations * (1 - now / more) - sums), _MICROBATCHES, text, _time(_MICROBATCHES), INSIDE)
    for how, price in _RECOMPUTING.items():
        if estimated is not None and estimated.of(how) < estimated.of(setting.recompute):
            share = 1 - estimated.of(how) / estimated.of(setting.recompute)
            yield Remedy(int(activations * share), price, f"--recompute {how}", _time(price), INSIDE)


def _more_ranks(usage: Usage, activations: int, setting: Setting) -> Iterator[Remedy]:
    needs, mesh, now = setting.needs, setting.mesh, setting.state()
    if mesh.fsdp > 1 and needs.zero < 3:
        cost = "for weights that are gathered once more in every microbatch"
        yield Remedy(int(now - setting.state(zero=3)), _ZERO, "--zero 3", cost, (*STATE, *INSIDE))
    wider = _wider(usage, activations, setting)
    if "fsdp" in wider:
        fewer = activations * (1 - mesh.fsdp / wider["fsdp"].fsdp)  # of the samples
        saved = now - setting.state(wider["fsdp"]) + fewer
        cost = "for weights and gradients that are exchanged in every microbatch"
        yield Remedy(int(saved), _FSDP, _mesh_option(wider["fsdp"], setting), cost, (*STATE, *INSIDE))
    if "pp" in wider:
        stages = wider["pp"].pp
        cost = f"for a bubble of about {(stages - 1) / (3 * stages - 1):.0%} of the time"  # two chunks a stage
        saved = now - setting.state(wider["pp"])
        yield Remedy(int(saved), _PP, _mesh_option(wider["pp"], setting), cost, STATE)
    if "tp" in wider:
        cost = "for values that are exchanged in every layer"
        saved = now - setting.state(wider["tp"])
        yield Remedy(int(saved), _TP, _mesh_option(wider["tp"], setting), cost, STATE)
    if setting.host_is_apart and not needs.offload:
        cost = "for copies between host and device in every microbatch"
        if mesh.fsdp > 1:
            yield Remedy(int(now - setting.state(offload=True)), _OFFLOAD, "--offload", cost, STATE)
        elif "fsdp" in wider:
            text = _mesh_option(wider["fsdp"], setting, " --offload")
            yield Remedy(int(now - setting.state(wider["fsdp"], offload=True)), _OFFLOAD, text, cost, STATE)


def _wider(usage: Usage, activations: int, setting: Setting) -> dict[str, Mesh]:
    """For each dimension in which the mesh can grow: the least growth with which all would fit, or else the most."""
    found = {}
    for name in INNER:
        options = [mesh for mesh in setting.larger if getattr(mesh, name) > getattr(setting.mesh, name)]
        here = [mesh for mesh in options if mesh.ranks <= setting.devices] or options[:1]
        fitting = [m for m in here if setting.state(m) + activations * setting.mesh.fsdp / m.fsdp <= _room(usage)]
        if here:
            found[name] = (fitting or here[-1:])[0]
    return found


def _room(usage: Usage) -> float:
    return USABLE * usage.capacity


def _mesh_option(mesh: Mesh, setting: Setting, more: str = "") -> str:
    text = f"--mesh dp={setting.replicas_with(mesh)},{mesh.inner}{more}"
    if mesh.ranks <= setting.devices:
        return text
    return f"{text} (on {mesh.ranks} GPUs; there {'is' if setting.devices == 1 else 'are'} {setting.devices} here)"


def explain(usage: Usage, setting: Setting, asked: str) -> DeviceMemory:
    """`asked`: the allocation that failed, in the allocator's words."""
    sizes = ", ".join(f"{name} {gigabytes(size)}" for name, size in usage.categories().items() if size)
    lines = [f"{r.text}: saves about {gigabytes(r.saves)}, {r.cost}" for r in remedies(usage, setting)[:SHOWN]]
    return DeviceMemory(
        f"the device is out of memory, most of which holds {usage.largest} "
        f"({gigabytes(usage.categories()[usage.largest])} of {gigabytes(usage.capacity)})",
        where=asked,
        cause=f"in use at the most: {sizes}",
        do="\n".join(lines) or "use a device with more memory, a smaller model or a smaller batch",
    )


def _time(share: float) -> str:
    return f"and costs about {share:.0%} of the time"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
