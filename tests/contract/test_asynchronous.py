# SPDX-License-Identifier: Apache-2.0
"""Workers that do not wait for each other: the bound holds, and every piece counts once, on every owner and copy."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from racing_rounds import ROWS, TURNS, WAYS, Diary, Replica, assert_counted_once, lives, sized
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread_each")


# --- the bound, and each piece once


EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@EVERY_WAY
@pytest.mark.parametrize("bound", [1, 2, 3, None])
@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 0), (4, 0), (2, 1), (3, 2), (4, 3)])
def test_under_random_delays_the_bound_holds_and_every_piece_counts_once_on_every_owner(
    bound: int | None, workers: int, servers: int, way: str
) -> None:
    membership, diary = sized(workers, servers), Diary()

    def life(replica: Replica) -> tuple[Tensor, Counter[int], Counter[int], int]:
        replica.strategy.diary = diary
        tallies, leads, delays = replica.strategy.tallies, Counter[int](), Counter[int]()
        for number in range(2):
            replica.round(membership, number)
            leads += tallies.leads
            delays += tallies.delays
        return replica.model.weight.detach().clone(), leads, delays, tallies.updates

    found = lives(membership, life, bound, rounds=2, slow=[0] if workers > 1 else [], **WAYS[way])
    for weight, *_ in found:
        assert_counted_once(weight)
        assert torch.equal(weight, found[0][0])
    pushes = 2 * TURNS * workers
    for rank in membership.owners:
        assert sum(found[rank][2].values()) == found[rank][3] == pushes
    leads = found[membership.owners[0]][1]
    assert sum(leads.values()) == pushes
    halves = [Diary(), Diary()]
    halves[0].lines, halves[1].lines = diary.lines[: 2 * pushes // 2], diary.lines[2 * pushes // 2 :]
    farthest = max(half.farthest() for half in halves)
    if bound is not None:
        assert max(leads) <= bound
        assert farthest <= bound


@EVERY_WAY
@pytest.mark.parametrize(("bound", "reached"), [(1, 1), (2, 2), (None, TURNS - 1)])
def test_a_slow_worker_lets_the_others_run_ahead_as_far_as_the_bound(bound: int | None, reached: int, way: str) -> None:
    """Without it, the test above would see nothing."""
    membership, has_begun, can_do_no_more = sized(2, 1), threading.Event(), threading.Event()
    allowed = 2 * (1 + 2 * reached)  # microbatches: the other half of the first step, and the steps up to the bound

    def slow(_: Replica) -> float:
        has_begun.set()
        assert can_do_no_more.wait(10)
        return 0.0

    def fast(replica: Replica) -> float:
        assert has_begun.wait(10)
        if replica.computed == allowed:
            can_do_no_more.set()
        return 0.0

    def life(replica: Replica) -> Any:
        replica.delay = partial(slow if replica.comm.rank == 0 else fast, replica)
        replica.round(membership)
        return replica.strategy.tallies.leads

    assert max(lives(membership, life, bound, **WAYS[way])[2]) == reached


@EVERY_WAY
@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2), (3, 0)])
def test_what_a_worker_computes_on_has_seen_all_that_is_older_than_the_bound(
    bound: int, workers: int, servers: int, way: str
) -> None:
    """Ho et al. 2013: who is at step t reads the updates of all steps before t - s, whoever made them."""
    membership, diary = sized(workers, servers), Diary()

    def life(replica: Replica) -> None:
        replica.strategy.diary = diary
        replica.round(membership)

    lives(membership, life, bound, slow=[1], **WAYS[way])
    for what, piece, seen in diary.lines:
        if what == "begin" and piece.turn > bound:
            assert seen is not None
            missing = (seen[: piece.turn - bound] != ROWS).nonzero().tolist()
            assert not missing, f"{piece} began without the updates of {missing}"


OVER_WIRES = [
    *((2, 0, None, copies, "mesh") for copies in (1, 2)),
    *((3, 2, 1, copies, "mesh") for copies in (1, 2)),
    *((2, 3, None, copies, "mesh") for copies in (1, 2)),
    *((2, 0, None, 1, "mesh-tls"), (2, 2, 1, 2, "mesh-tls")),
]


@EVERY_WAY
@pytest.mark.parametrize(("workers", "servers", "bound", "copies", "kind"), OVER_WIRES)
def test_over_shared_memory_between_machines_and_with_copies_every_piece_counts_once(
    workers: int, servers: int, bound: int | None, copies: int, kind: str, way: str
) -> None:
    membership = sized(workers, servers)

    def life(replica: Replica) -> Tensor:
        for number in range(2):
            replica.round(membership, number)
        return replica.model.weight.detach().clone()

    for weight in lives(membership, life, bound, kind, copies, rounds=2, **WAYS[way]):
        assert_counted_once(weight)


@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (3, 3), (3, 0)])
def test_copies_of_a_slice_see_the_same_updates(workers: int, servers: int) -> None:
    membership = sized(workers, servers)

    def life(replica: Replica) -> list[tuple[Any, int, int, Tensor]]:
        replica.round(membership)
        held = replica.strategy._held
        return [(place, one.version, len(one.seen), one.weights.clone()) for place in held for one in held[place]]

    found = [entry for entries in lives(membership, life, None, copies=2) for entry in entries]
    assert len(found) == 2 * len(membership.owners)
    for place in {entry[0] for entry in found}:
        one, other = (entry for entry in found if entry[0] == place)
        assert one[1:3] == other[1:3] == (TURNS * workers, TURNS * workers)
        assert torch.equal(one[3], other[3])
