# SPDX-License-Identifier: Apache-2.0
"""Which layers go to which stage: tables of cuts, and what is refused before anything starts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.errors import SetupError
from unisono.parallel.pipeline_split import by_boundaries, by_cost, rank_of_stage, stage_costs, stages_of_rank

LAYERS = ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")


@pytest.mark.parametrize(
    ("costs", "ranks", "virtual", "boundaries"),
    [
        ([1, 1, 1, 1, 1, 1], 2, 1, ("blocks.2",)),
        ([1, 1, 1, 1, 1, 1], 3, 1, ("blocks.1", "blocks.3")),
        ([1, 1, 1, 1, 1, 1], 3, 2, LAYERS[1:]),
        ([0, 1, 1, 1, 1, 2], 2, 1, ("blocks.3",)),
        ([9, 1, 1, 1, 1, 1], 2, 1, ("blocks.0",)),
        ([1, 1, 1, 1, 1, 9], 2, 1, ("head",)),
        ([1, 9, 1, 1, 1, 1], 3, 1, ("blocks.0", "blocks.1")),  # the slowest is 9 anyhow; then as even as can be
        ([0, 0, 0, 0, 0, 0], 2, 1, ("blocks.0",)),
        ([5, 5, 5, 5, 5, 5], 1, 1, ()),
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    costs: list[float], ranks: int, virtual: int, boundaries: tuple[str, ...]
) -> None:
    assert by_cost(LAYERS, costs, ranks, virtual).boundaries == boundaries


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=8), stages=st.integers(1, 8))
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[int], stages: int) -> None:
    names = [str(position) for position in range(len(costs))]
    if stages > len(costs):
        with pytest.raises(SetupError):
            by_cost(names, costs, stages, 1)
        return
    split = by_cost(names, costs, stages, 1)
    cuts = combinations(range(1, len(costs)), stages - 1)
    best = min(max(sum(costs[a:b]) for a, b in pairwise([0, *cut, len(costs)])) for cut in cuts)
    assert max(stage_costs(split, costs)) == best
    assert [position for stage in split.stages for position in stage] == list(range(len(costs)))
    assert all(split.stages)


def test_a_cut_by_measured_costs_is_the_one_that_its_own_boundaries_give() -> None:
    split = by_cost(LAYERS, [1, 2, 3, 1, 2, 3], 3, 1)
    assert by_boundaries(LAYERS, split.boundaries, 3, 1) == split
    assert split.describe()[0] == "stage 0  embed .. blocks.0  (2 layers)"


def test_fewer_layers_than_stages_shows_the_arithmetic() -> None:
    with pytest.raises(SetupError) as raised:
        by_cost(LAYERS[:5], [1] * 5, 4, 2)
    assert raised.value.what == (
        "a pipeline with fewer layers than stages: pp=4 x 2 stages a rank = 8 stages, but the model has 5 layers"
    )
    assert "pp=2 or less or fewer stages a rank" in raised.value.do


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        (["blocks.1"], "1 boundaries cut the model into 2 stages, but there are 3 (pp=3 x 1 a rank)"),
        (["blocks.1", "blok.3"], "'blok.3' is no layer"),
        (["blocks.1", "blocks.1"], "'blocks.1' is not after the one before it"),
        (["blocks.2", "blocks.1"], "'blocks.1' is not after the one before it"),
        (["embed", "blocks.1"], "'embed' is the first layer"),
    ],
)
def test_boundaries_that_cannot_be_are_refused(boundaries: list[str], words: str) -> None:
    with pytest.raises(SetupError) as raised:
        by_boundaries(LAYERS, boundaries, 3, 1)
    assert words in raised.value.what


def test_stages_go_round_the_ranks() -> None:
    assert [stages_of_rank(rank, 3, 2) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [rank_of_stage(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
