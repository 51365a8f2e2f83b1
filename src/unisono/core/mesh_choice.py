# SPDX-License-Identifier: Apache-2.0
"""Which mesh ``--mesh auto`` picks: a pure function of what a training needs and what the devices have. Torch-free.

Whole replicas if one device holds weights, gradients and optimizer state, with room for the rest; otherwise the
smallest fsdp that fits; tp where even that leaves a unit too large. `control.mesh_auto` asks a probe for the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from unisono.core.errors import SetupError
from unisono.core.mesh import Mesh
from unisono.core.spec import Workers, default_microbatches

HEADROOM = 0.25  # of a device's memory, for activations, buffers of collectives and what else the script holds
MOST_TENSOR_RANKS = 8  # beyond, a layer's parts are too small to be worth their exchange
_SHOWN = 4  # candidates, in an error


@dataclass(frozen=True)
class Needs:
    """What a probe has found out about a training, in bytes where nothing else is said."""

    parameters: int  # a number
    weights: int
    gradients: int  # of what is trained
    state: int  # of the optimizer
    unit: int  # the largest block that fsdp puts together at once
    rest: int  # what is in no block, and is together all the time
    optimizer: str
    assumed: bool = False  # the optimizer's state: two float32 a parameter, for want of a trial
    dtypes: Mapping[str, int] = field(default_factory=dict)  # weights by dtype
    batch_size: int = 1
    microbatches: int | None = None  # as asked
    zero: int = 3
    offload: bool = False
    gpus: tuple[int, ...] = ()  # the memory of each
    mesh: str = ""  # that the script asks for


@dataclass(frozen=True)
class Devices:
    count: int
    each: int  # bytes
    shared: bool = False  # the memory of one machine, cut into so many

    @property
    def words(self) -> str:
        who = "a device" if not self.shared else f"each of {self.count} processes" if self.count > 1 else "this machine"
        return f"{who} has {_size(self.each)}"

    @property
    def budget(self) -> float:
        return self.each * (1 - HEADROOM)


@dataclass(frozen=True)
class Choice:
    mesh: str  # as --mesh takes it
    text: str


def devices_of(needs: Needs, machine_bytes: int, asked: Workers | None) -> Devices:
    """GPUs, as many as are asked for or all; without any, the machine's memory shared by the processes."""
    if not needs.gpus:
        count = asked.max if asked else 1
        return Devices(count, machine_bytes // count, shared=True)
    count = asked.max if asked else len(needs.gpus)
    if count > len(needs.gpus):
        raise SetupError(
            f"--mesh auto: {count} processes need {count} GPUs, and there are {len(needs.gpus)} here",
            cause="each process computes on a GPU of its own",
            do=f"use --workers {len(needs.gpus)}, or --device cpu",
        )
    return Devices(count, min(needs.gpus))


def choose(needs: Needs, devices: Devices, asked: Workers | None = None) -> Choice:
    """`asked` are processes altogether, of which those beyond the minimum may come and go. Raises SetupError with the
    arithmetic where nothing fits."""
    if needs.offload:
        raise SetupError(
            "--mesh auto does not count with offloading",
            cause="how much stays on the device then depends on what is in use at the moment",
            do="write the mesh out, such as --mesh dp=2,fsdp=2, or leave out offload",
        )
    tried = []
    for mesh in candidates(devices.count):
        replicas = devices.count // mesh.ranks
        needed, samples = bytes_of(needs, mesh, replicas), samples_of(needs, replicas)
        small = mesh.fsdp > max(1, samples)
        if needed <= devices.budget and not small:
            dp = _replicas(mesh, devices.count, asked)
            named = ",".join(filter(None, (f"dp={dp}", mesh.inner)))
            return Choice(named, f"{named}: {_story(needs, devices)}, {devices.words}")
        why = f" (a microbatch has {samples} samples)" if small else ""
        tried.append(f"{mesh.inner or 'dp only'}: {_size(needed)} a device{why}")
    raise _nothing_fits(needs, devices, tried)


def candidates(count: int) -> Iterator[Mesh]:
    """In the order of preference: no tp before any, and the smallest replica first."""
    for tp in _divisors(count):
        if tp <= MOST_TENSOR_RANKS:
            yield from (Mesh(fsdp=fsdp, tp=tp) for fsdp in _divisors(count // tp))


def bytes_of(needs: Needs, mesh: Mesh, replicas: int) -> float:
    """What a rank holds at the peak of a step, without activations."""
    return sum(held(needs, mesh, replicas))


def held(needs: Needs, mesh: Mesh, replicas: int) -> tuple[float, float]:
    """Its part of everything, and what is whole for a moment. A block is there up to four times: received, as weights,
    as gradients, and as what is sent (bench/mesh_memory.py). What is in no block is whole all the time, and its
    gradients come last. Whole weights do not replace the parts, which stay beside them."""
    microbatches = _microbatches(needs, replicas)
    sums = needs.gradients * gradient_copies(-(-microbatches // replicas))
    parts = (needs.weights + sums + needs.state) / mesh.ranks
    if mesh.fsdp == 1:
        return parts, 0.0
    if needs.zero == 3:
        return parts, (needs.rest + max(4 * needs.unit, 3 * needs.rest)) / mesh.tp
    return parts, (needs.weights / mesh.pp + max(3 * needs.unit, 2 * needs.rest)) / mesh.tp


def gradient_copies(microbatches: int) -> int:
    """Partial sums that a replica keeps while it adds up so many microbatches: a binary counter's."""
    return max(1, microbatches.bit_length() - 1)


def samples_of(needs: Needs, replicas: int) -> int:
    """Of a microbatch, which fsdp ranks share between them."""
    return needs.batch_size // _microbatches(needs, replicas)


def _microbatches(needs: Needs, replicas: int) -> int:
    return needs.microbatches or default_microbatches(replicas, needs.batch_size)


def _replicas(mesh: Mesh, count: int, asked: Workers | None) -> str:
    most = count // mesh.ranks
    least = -(-asked.min // mesh.ranks) if asked else most
    return str(most) if least == most else f"{least}:{most}"


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if not count % size]


def _story(needs: Needs, devices: Devices) -> str:
    """``1.2 B parameters need 19.4 GB with gradients and AdamW's state``"""
    whole = bytes_of(needs, Mesh(), devices.count)
    state = f" and {needs.optimizer}'s state" if needs.state else f"; {needs.optimizer} keeps no state"
    if needs.assumed:
        state = f" and what {needs.optimizer} keeps, assumed to be two float32 for each"
    return f"{_count(needs.parameters)} parameters need {_size(whole)} with gradients{state}"


def _nothing_fits(needs: Needs, devices: Devices, tried: list[str]) -> SetupError:
    left = [f"and {len(tried) - _SHOWN} more"] if len(tried) > _SHOWN else []
    rows = [
        f"of which {_size(devices.budget)} may be used: {HEADROOM:.0%} is left for activations and buffers",
        *tried[:_SHOWN],
        *left,
        f"with fsdp, of which a block of {_size(needs.unit)}, and {_size(needs.rest)} outside of blocks, are whole for "
        "a moment, with their gradients and what is sent of them",
    ]
    return SetupError(
        f"--mesh auto: {_story(needs, devices)}, and no mesh of {devices.count} fits: {devices.words}",
        cause="\n".join(rows),
        do="more devices or more memory; a smaller dtype, or an optimizer that keeps less; or write the mesh out, with "
        "pp or --offload",
    )


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return str(number)
