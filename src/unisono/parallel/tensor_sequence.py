# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism, decided: between which blocks a sequence may lie cut over the ranks, and what speaks against.

Pure. Outside attentions and feed-forward pairs a block works on each position by itself, so each rank can hold its own
part of the sequence there (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from unisono.core.errors import SetupError
from unisono.parallel.tensor_blocks import Unit
from unisono.parallel.tensor_names import is_norm, join, parents

Stack = tuple[str, ...]  # blocks that run one after the other; the sequence is cut before the first


def stacks_of(model: nn.Module, units: Sequence[Unit]) -> tuple[Stack, ...]:
    """The outermost lists of modules that hold units, with all their blocks."""
    lists: dict[str, None] = {}
    for unit in units:
        around = [p for p in parents(unit.name) if isinstance(model.get_submodule(p), nn.ModuleList | nn.Sequential)]
        if around:
            lists[around[-1]] = None
    return tuple(tuple(join(name, child) for child, _ in model.get_submodule(name).named_children()) for name in lists)


def why_no_sequence(
    model: nn.Module,
    units: Sequence[Unit],
    stacks: Sequence[Stack],
    whole: Mapping[str, str],
    positionwise: Sequence[str],
) -> str:
    """The first thing that needs whole sequences where they would be cut; empty if there is none."""
    if not stacks:
        return "no list of blocks with attentions or feed-forward pairs that can be cut was found"
    blocks = {block for stack in stacks for block in stack}
    for unit in units:
        if unit.kind == "attention" and unit.name in blocks:
            return f"the attention of {unit.name!r} is not a module of its own, so its input cannot be put together"
        module = model.get_submodule(unit.name)
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            return f"{unit.name!r} has the sequence in its first dimension; build it with batch_first=True"
    inside = {unit.name for unit in units if unit.name not in blocks}
    for name in whole:
        around = (name, *parents(name))
        if blocks.isdisjoint(around) or not inside.isdisjoint(around) or not set(positionwise).isdisjoint(around):
            continue
        if not is_norm(model.get_submodule(name)):
            return f"{name!r} stays whole, and may need the whole sequence"
    return ""


def check_length(length: int, ways: int) -> None:
    """A sequence must fill all ranks equally."""
    if length % ways:
        raise SetupError(
            f"a sequence of {length} positions cannot be cut into {ways} equal parts",
            cause=f"{length} / {ways} = {length / ways:g} positions a rank",
            do=f"pad sequences to {-(-length // ways) * ways}, or leave sequence parallelism out",
        )
