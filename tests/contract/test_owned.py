# SPDX-License-Identifier: Apache-2.0
"""Sums that stay with the owners of their slices: the bits of one worker alone, for any team of workers and servers."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together
from torch import Tensor

from unisono.comm import tree
from unisono.comm.handing import hand_round
from unisono.comm.reducers.owned import OwnedReducer, shared_out
from unisono.comm.seam import Comm
from unisono.comm.slicing import length_of
from unisono.core.membership import Membership

TEAMS = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))  # workers, servers
LENGTHS = (0, 1, 63, 64, 1000, 70_001)


def team(workers: int, servers: int, microbatches: int = 0) -> Membership:
    """Workers with 1, 2, 1, 2, ... microbatches, and servers behind them."""
    counts = [1 + rank % 2 for rank in range(workers)]
    counts[-1] += max(0, microbatches - sum(counts))
    bounds = [*itertools.accumulate([0, *counts])]
    ranges = [range(a, b) for a, b in itertools.pairwise(bounds)]
    ranges += [range(bounds[-1], bounds[-1])] * servers
    return Membership(1, tuple(range(workers + servers)), tuple(ranges))


@functools.lru_cache(maxsize=64)
def leaves(microbatches: int, length: int) -> tuple[Tensor, ...]:
    """Values whose sum depends on the order."""
    seeded = torch.Generator().manual_seed(microbatches * 1000 + length)
    scale = torch.logspace(-6, 6, max(length, 1))[:length]
    return tuple(torch.randn(length, generator=seeded) * scale for _ in range(microbatches))


@functools.lru_cache(maxsize=64)
def on_one_worker(microbatches: int, length: int) -> Tensor:
    rows = list(leaves(microbatches, length))
    plan = tree.fold(((i, i + 1) for i in range(microbatches)), microbatches)
    for left, right in plan.merges:
        rows[left] = rows[left] + rows[right]
    return rows[plan.nodes[0][0]]


def landed(reducer: OwnedReducer, mine: range, length: int) -> list[Tensor]:
    values = leaves(reducer.membership.microbatches, length)
    levels: list[Tensor] = []
    for landing, microbatch in zip(reducer.landings(mine), mine, strict=True):
        if not landing.merges:
            levels[landing.level :] = [values[microbatch].clone()]
            continue
        total = values[microbatch]
        for level in range(landing.level, landing.level - landing.merges, -1):
            total = levels[level] + total
            levels[level] = total
    return levels[: reducer.parts] or [torch.full((length,), float("nan"))]  # a server brings nothing


def owned_places(length: int, membership: Membership, rank: int, copies: int) -> list[slice]:
    return [shared_out(length, membership, copy)[rank] for copy in range(min(copies, len(membership.owners)))]


def check_sums(kind: str, membership: Membership, copies: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    def work(comm: Comm) -> list[tuple[Tensor, Tensor, Tensor]]:
        reducer = OwnedReducer(comm, membership, copies=copies)
        found = []
        for tag, length in enumerate(lengths):
            parts = landed(reducer, membership.ranges[comm.rank], length)
            assert len(parts) == reducer.parts
            reducer.reduce(parts, tag)
            owned = parts[0].clone()
            reducer.collect_copies(parts[0], tag)
            of_owners = parts[0].clone()
            reducer.collect(parts[0], tag)
            found.append((owned, of_owners, parts[0]))
        return found

    results = together(kind, len(membership.members), work, membership=membership)
    for rank, found in enumerate(results):
        for length, (owned, of_owners, everything) in zip(lengths, found, strict=True):
            expected = on_one_worker(membership.microbatches, length)
            for place in owned_places(length, membership, rank, copies):
                assert torch.equal(owned[place], expected[place])
            if rank in membership.owners:
                assert torch.equal(of_owners, expected)
            assert torch.equal(everything, expected)


@pytest.mark.parametrize(("workers", "servers"), TEAMS)
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_owners_have_the_bits_of_one_worker_and_so_has_everybody_after_collecting(
    workers: int, servers: int, copies: int
) -> None:
    check_sums("threads", team(workers, servers), copies)


@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (2, 1), (3, 2), (1, 3)])
@pytest.mark.parametrize("copies", [1, 2])
def test_it_is_the_same_over_shared_memory_also_for_vectors_that_are_read_where_they_lie(
    workers: int, servers: int, copies: int
) -> None:
    check_sums("mesh", team(workers, servers), copies, (1, 1000, 300_001))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(1, 3), st.integers(0, 3000))
def test_any_team_and_any_length(workers: int, servers: int, more: int, copies: int, length: int) -> None:
    check_sums("threads", team(workers, servers, 2 * workers + more), copies, (length,))


@given(st.integers(0, 5000), st.integers(1, 4), st.integers(0, 4), st.integers(0, 3))
def test_every_copy_covers_the_vector_once_in_aligned_slices(
    length: int, workers: int, servers: int, copy: int
) -> None:
    membership = team(workers, servers)
    parts = [part for part in shared_out(length, membership, copy) if length_of(part)]
    parts.sort(key=lambda part: part.start)
    bounds = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == bounds[:-1]
    assert bounds[-1] == length
    assert all(part.start % 64 == 0 for part in parts)
    for rank in range(workers if servers else 0):
        assert not length_of(shared_out(length, membership, copy)[rank]), "who computes owns nothing beside servers"


@given(st.integers(1, 5000), st.integers(0, 4), st.integers(2, 4))
def test_no_owner_has_two_copies_of_the_same_slice(length: int, servers: int, workers: int) -> None:
    membership = team(workers, servers)
    for copies in range(1, len(membership.owners) + 1):
        for rank in membership.owners:
            places = [place for place in owned_places(length, membership, rank, copies) if length_of(place)]
            assert len({place.start for place in places}) == len(places)


def test_slices_of_a_long_vector_are_even() -> None:
    for servers in (1, 2, 3, 4):
        sizes = [length_of(part) for part in shared_out(100_000, team(3, servers)) if length_of(part)]
        assert len(sizes) == servers
        assert max(sizes) - min(sizes) <= 64


def test_large_slices_end_with_pages_and_are_even_but_for_one() -> None:
    for servers in (2, 3, 4):
        parts = [part for part in shared_out(5_000_001, team(3, servers)) if length_of(part)]
        assert all(part.start * 2 % 4096 == 0 for part in parts), "also those of numbers of 2 bytes"
        sizes = [length_of(part) for part in parts]
        assert max(sizes) - min(sizes) <= 2 * 2048


def test_more_copies_than_owners_are_as_many_as_owners() -> None:
    def work(comm: Comm) -> int:
        return OwnedReducer(comm, team(2, 1), copies=3).copies

    assert together("threads", 3, work, membership=team(2, 1)) == [1, 1, 1]


@pytest.mark.parametrize("kind", ["threads", "mesh"])
@pytest.mark.parametrize("receivers", [(0,), (2,), (0, 1, 2), (1, 2), ()])
def test_a_tree_of_state_is_handed_to_those_who_receive_and_to_nobody_else(
    kind: str, receivers: tuple[int, ...]
) -> None:
    def tree_of(rank: int) -> dict[str, object]:
        vector = torch.arange(rank * 1000, dtype=torch.float64)  # the first has none
        return {"rank": rank, "vector": vector, "odd": [(1, 2.5), None, torch.tensor(True)], "texts": "ä" * rank}

    def work(comm: Comm) -> list[dict[str, object]]:
        return [found for tag in (0, 7) for found in hand_round(comm, tree_of(comm.rank), receivers, tag)]

    for rank, found in enumerate(together(kind, 3, work)):
        assert len(found) == (6 if rank in receivers else 0)
        for sender, tree_found in enumerate(found[:3]):
            assert str(tree_found) == str(tree_of(sender))
            assert torch.equal(tree_found["vector"], tree_of(sender)["vector"])  # type: ignore[arg-type]
