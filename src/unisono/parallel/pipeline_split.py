# SPDX-License-Identifier: Apache-2.0
"""Which layers go to which stage of a pipeline. Pure: names and costs in, ranges out; no torch, no processes.

A model is a sequence of named layers. A *boundary* is the name of the layer with which a new stage begins. With
several stages on each rank (virtual stages) they go round: rank r of S holds the stages r, r + S, r + 2S and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unisono.core.errors import SetupError, suggest

_Worth = Callable[[float, float], float]  # (worth of the stages before, cost of the last one) -> worth of all


@dataclass(frozen=True)
class Split:
    """A model's layers, cut into contiguous stages."""

    layers: tuple[str, ...]
    stages: tuple[range, ...]  # positions of the layers of each stage, in order

    @property
    def boundaries(self) -> tuple[str, ...]:
        return tuple(self.layers[stage.start] for stage in self.stages[1:])

    def describe(self) -> list[str]:
        """A line for each stage: ``stage 0  embed .. blocks.3  (5 layers)``."""
        lines = []
        for number, stage in enumerate(self.stages):
            names = (
                self.layers[stage.start] if len(stage) == 1 else f"{self.layers[stage[0]]} .. {self.layers[stage[-1]]}"
            )
            lines.append(f"stage {number}  {names}  ({len(stage)} layer{'s' if len(stage) > 1 else ''})")
        return lines


def rank_of_stage(stage: int, ranks: int) -> int:
    return stage % ranks


def stages_of_rank(rank: int, ranks: int, virtual: int) -> tuple[int, ...]:
    return tuple(range(rank, ranks * virtual, ranks))


def check_enough(layers: Sequence[str], ranks: int, virtual: int) -> None:
    """A stage without a layer has nothing to do and nothing to send."""
    stages = ranks * virtual
    if len(layers) < stages:
        product = (
            f"pp={ranks} x {virtual} stages a rank = {stages} stages"
            if virtual > 1
            else f"pp={ranks} = {stages} stages"
        )
        fewer = max(1, len(layers) // virtual)
        other = " or fewer stages a rank" if virtual > 1 else ""
        raise SetupError(
            f"a pipeline with fewer layers than stages: {product}, but the model has {len(layers)} layers",
            cause=f"its layers are {', '.join(layers)}",
            do=f"use pp={fewer} or less{other}, or name finer layers in pipeline_layers()",
        )


def by_boundaries(layers: Sequence[str], boundaries: Sequence[str], ranks: int, virtual: int) -> Split:
    """The user's cut: each name begins a new stage."""
    check_enough(layers, ranks, virtual)
    stages = ranks * virtual
    if len(boundaries) != stages - 1:
        raise SetupError(
            f"{len(boundaries)} boundaries cut the model into {len(boundaries) + 1} stages, but there are {stages}"
            f" (pp={ranks} x {virtual} a rank)",
            do=f"name {stages - 1} layers with which a new stage begins, or none: then the cut is found",
        )
    places = {name: position for position, name in enumerate(layers)}
    for name in boundaries:
        if name not in places:
            known = ", ".join(layers)
            raise SetupError(f"boundary {name!r} is no layer", cause=suggest(name, layers), do=f"take one of {known}")
    starts = [0, *(places[name] for name in boundaries)]
    for before, after in pairwise(starts):
        if after <= before:
            first = (
                "the first layer, and a new stage cannot begin there" if after == 0 else "not after the one before it"
            )
            raise SetupError(
                f"boundary {layers[after]!r} is {first}",
                cause=f"boundaries {', '.join(boundaries)}",
                do="name each layer once, in the order of the model, without the first",
            )
    return Split(tuple(layers), _ranges(starts, len(layers)))


def by_cost(layers: Sequence[str], costs: Sequence[float], ranks: int, virtual: int) -> Split:
    """The cut whose slowest stage is fastest; of several, the one with the most even stages, then the earliest."""
    check_enough(layers, ranks, virtual)
    if len(costs) != len(layers):
        raise ValueError(f"{len(costs)} costs for {len(layers)} layers")
    if any(not cost >= 0 for cost in costs):
        raise ValueError(f"costs must be numbers and not negative: {list(costs)}")
    return Split(tuple(layers), _ranges(_even_starts(costs, ranks * virtual), len(layers)))


def stage_costs(split: Split, costs: Sequence[float]) -> tuple[float, ...]:
    return tuple(sum(costs[position] for position in stage) for stage in split.stages)


def _ranges(starts: Sequence[int], end: int) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in pairwise([*starts, end]))


def _even_starts(costs: Sequence[float], stages: int) -> list[int]:
    """Two passes of dynamic programming over prefixes: the least slowest stage, then under it the least squares."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    slowest = _best(total, stages, worth=lambda before, last: max(before, last))[0]
    limit = slowest * (1 + 1e-12)  # a sum taken in another order may round up
    return _best(total, stages, worth=lambda before, last: before + last * last if last <= limit else float("inf"))[1]


def _best(total: Sequence[float], stages: int, worth: _Worth) -> tuple[float, list[int]]:
    """The least worth of a cut of all layers into `stages`, and where its stages start."""
    count = len(total) - 1
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(float("inf"), [])] * count]  # by number of layers taken
    for stage in range(1, stages + 1):
        row: list[tuple[float, list[int]]] = [(float("inf"), [])] * (count + 1)
        for stop in range(stage, count - (stages - stage) + 1):
            row[stop] = _cheapest(best, total, stage, stop, worth)
        best = row
    return best[count]


def _cheapest(
    best: Sequence[tuple[float, list[int]]], total: Sequence[float], stage: int, stop: int, worth: _Worth
) -> tuple[float, list[int]]:
    found: tuple[float, list[int]] = (float("inf"), [])
    for start in range(stage - 1, stop):
        value = worth(best[start][0], total[stop] - total[start])
        if value < found[0] or not found[1]:
            found = (value, [*best[start][1], start])
    return found
