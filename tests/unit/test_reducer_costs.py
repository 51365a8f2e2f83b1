# SPDX-License-Identifier: Apache-2.0
"""The predicted seconds of every all-reduce algorithm: the formulas of the literature, and who wins where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.comm.reducers import ALGORITHMS
from unisono.comm.reducers.cost import Links, round_s, uniform
from unisono.core.membership import even

LATENCY_S, BYTES_PER_S, ADD_S = 1e-3, 1e8, 1e-10
MB = 1 << 20


def seconds(name: str, bytes_: float, links: Links, microbatches: int = 0, exact: bool = False) -> float:
    membership = even(1, tuple(range(links.size)), microbatches or links.size)
    return ALGORITHMS[name].cost_s(bytes_, links, membership, exact)


def alike(size: int, latency_s: float = LATENCY_S, add_s: float = ADD_S, hosts: str = "") -> Links:
    return uniform(size, latency_s, BYTES_PER_S, tuple(hosts) or tuple(map(str, range(size))), add_s)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_direct_costs_two_latencies_and_the_bytes_of_a_ring(size: int) -> None:
    n, share = 8 * MB, (size - 1) / size
    expected = 2 * (LATENCY_S + n * share / BYTES_PER_S) + n * share * ADD_S
    assert seconds("direct", n, alike(size)) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_a_ring_costs_a_latency_for_every_step(size: int) -> None:
    n, links = 8 * MB, alike(size, add_s=0.0)
    assert seconds("ring", n, links) == pytest.approx(2 * (size - 1) * (LATENCY_S + n / size / BYTES_PER_S))


@pytest.mark.parametrize(("size", "rounds"), [(2, 1), (4, 2), (8, 3), (16, 4)])
def test_halving_costs_two_latencies_for_every_doubling_of_workers(size: int, rounds: int) -> None:
    n, links = 8 * MB, alike(size, add_s=0.0)
    expected = 2 * (rounds * LATENCY_S + n * (size - 1) / size / BYTES_PER_S)
    assert seconds("halving", n, links) == pytest.approx(expected)


def test_halving_pays_for_workers_beyond_a_power_of_two() -> None:
    n, links = 8 * MB, alike(5, add_s=0.0)
    assert seconds("halving", n, links) - seconds("halving", n, alike(4, add_s=0.0)) == pytest.approx(
        2 * (LATENCY_S + n / BYTES_PER_S)
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_alone_nothing_costs_anything_and_more_bytes_cost_more(name: str) -> None:
    assert seconds(name, MB, alike(1)) == 0.0
    for size in (2, 3, 5, 8):
        costs = [seconds(name, bytes_, alike(size)) for bytes_ in (0, 1, 1000, MB, 16 * MB, 256 * MB)]
        assert costs == sorted(costs)
        assert costs[0] == 0.0
        assert costs[1] >= LATENCY_S


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("ring", "backend")])
def test_exactness_costs_nothing_where_ranges_are_subtrees_and_rows_where_they_are_not(name: str) -> None:
    links = alike(4)
    loose = seconds(name, MB, links, 8)
    assert seconds(name, MB, links, 4, exact=True) >= loose
    assert seconds(name, MB, links, 7, exact=True) >= seconds(name, MB, links, 8, exact=True)
    assert seconds("direct", MB, links, 8, exact=True) == pytest.approx(seconds("direct", MB, links, 8))


def test_small_vectors_are_for_few_rounds_and_large_ones_for_few_bytes() -> None:
    far = alike(16, latency_s=0.02)
    for name in ("direct", "tree", "double-tree", "halving"):
        assert seconds(name, 1000, far) < seconds("ring", 1000, far)
    for name in ("direct", "ring", "halving"):
        assert seconds(name, 256 * MB, far) < seconds("tree", 256 * MB, far)


def test_two_trees_are_faster_than_one_for_large_vectors() -> None:
    links = alike(8)
    assert seconds("double-tree", 64 * MB, links) < 0.75 * seconds("tree", 64 * MB, links)


def test_a_hierarchy_saves_bytes_between_hosts() -> None:
    hosts = "aaaabbbb"
    near = [[1e10 if one == other else 1e8 for other in hosts] for one in hosts]
    links = replace(alike(8, hosts=hosts), bytes_per_s=tuple(map(tuple, near)))
    assert seconds("hierarchical", 64 * MB, links) < seconds("direct", 64 * MB, links) / 3


def test_a_hosts_ranks_share_its_way_out() -> None:
    links = alike(4, hosts="aabb")
    one = round_s(links, [(0, 2, MB)])
    assert round_s(links, [(0, 2, MB), (1, 3, MB)]) == pytest.approx(2 * one - LATENCY_S)
    assert round_s(links, [(0, 2, MB), (2, 0, MB)]) == pytest.approx(one)


def test_a_crowded_host_is_as_slow_as_all_its_ranks_together() -> None:
    free = uniform(4, 0.0, BYTES_PER_S)
    crowded = replace(free, together_bytes_per_s=(BYTES_PER_S / 2,) * 4)
    ring = [(0, 1, MB), (1, 2, MB), (2, 3, MB), (3, 0, MB)]
    assert round_s(crowded, ring) == pytest.approx(2 * round_s(free, ring))
    assert round_s(crowded, ring[:1]) == pytest.approx(round_s(free, ring[:1]))


def test_the_slowest_link_decides_a_ring_and_not_a_tree_that_does_not_use_it() -> None:
    slow = [[BYTES_PER_S / 50 if {one, other} == {0, 7} else BYTES_PER_S for other in range(8)] for one in range(8)]
    links = replace(alike(8), bytes_per_s=tuple(map(tuple, slow)))
    assert seconds("ring", 16 * MB, links) > 10 * seconds("ring", 16 * MB, alike(8))
    assert seconds("tree", 16 * MB, links) == pytest.approx(seconds("tree", 16 * MB, alike(8)))
