# SPDX-License-Identifier: Apache-2.0
"""Somebody is lost in the middle of a round: every piece still counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from broken_rounds import LOSSES, SERVERS_LOST, broken_round
from racing_rounds import MICROBATCHES, TURNS, WAYS, Replica, assert_counted_once, lives, sized, team
from ranks import in_threads, network
from torch import Tensor

from unisono.core import events
from unisono.core.errors import PeerLost, SlicesLost
from unisono.core.membership import Membership
from unisono.parallel.owner import Owner

pytestmark = pytest.mark.usefixtures("one_thread_each")


EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@EVERY_WAY
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bound", [1, None])
def test_when_a_worker_is_lost_the_rest_finish_the_round_and_every_piece_counts_once(
    name: str, at: int, bound: int | None, way: str
) -> None:
    before, after = LOSSES[name]
    told = list[events.Event]()
    found = broken_round(before, after, lost=1, at=at, bound=bound, seed=at, emit=told.append, **WAYS[way])
    assert len(found) == len(after.members)
    for weight in found:
        assert_counted_once(weight)
    (round_,) = told
    assert isinstance(round_, events.Staleness)
    assert round_.acknowledged == round_.applied == TURNS * len(before.workers), "the servers have those of the dead"
    assert round_.pushed >= round_.applied


@EVERY_WAY
@pytest.mark.parametrize("messages", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [team(2, [0, 1], [2, 3]), team(2, [1], [2, 3]), team(2, [0, 1], [3, 2])])
def test_a_piece_that_one_owner_has_seen_and_the_other_has_not_counts_once_on_both(
    messages: int, after: Membership, way: str
) -> None:
    """By buckets, a piece is three messages to each: it breaks off behind any of them."""
    for weight in broken_round(team(1, [0, 1], [2, 3]), after, None, -1, half_pushed=messages, **WAYS[way]):
        assert_counted_once(weight)


@EVERY_WAY
@pytest.mark.parametrize("name", SERVERS_LOST)
@pytest.mark.parametrize("messages", [1, 3, 5])
def test_with_two_copies_a_server_may_be_lost_in_the_middle_of_a_round(name: str, messages: int, way: str) -> None:
    before, after = SERVERS_LOST[name]
    told = list[events.Event]()
    for weight in broken_round(
        before, after, None, -1, copies=2, half_pushed=messages, rows=600, emit=told.append, **WAYS[way]
    ):
        assert_counted_once(weight)
    check_nothing_is_lost(told, TURNS * len(before.workers), after)


@EVERY_WAY
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("lost", [0, 1])
def test_with_two_copies_a_worker_that_is_a_server_too_may_be_lost(lost: int, at: int, way: str) -> None:
    before, after = team(1, [0, 1, 2]), team(2, [number for number in range(3) if number != lost])
    told = list[events.Event]()
    found = broken_round(before, after, lost, at, copies=2, seed=at, rows=600, emit=told.append, **WAYS[way])
    assert len(found) == 2
    for weight in found:
        assert_counted_once(weight)
    check_nothing_is_lost(told, TURNS * 3, after)


@pytest.mark.parametrize("after", [team(2, [0, 1]), team(2, [1, 0]), team(2, [1], [0]), team(2, [0], [1])])
def test_who_had_not_begun_a_round_that_was_broken_off_goes_on_where_the_others_are(
    after: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner has made an update already, of a piece that would not be one of the new generation. That cannot be with
    pulled weights: nobody gets any from who has not begun."""
    before, is_made, told = team(1, [0, 1, 2]), threading.Event(), list[events.Event]()
    see: Callable[..., Any] = Owner._see

    def seeing(owner: Owner, *arguments: Any) -> Any:
        found = see(owner, *arguments)
        is_made.set()
        return found

    with network("threads", 15) as net:
        comms = net.comms(before.members)
        all_have_met = threading.Barrier(3)

        def life(number: int) -> Tensor | None:
            replica = Replica(comms[number], None, copies=2, rounds=2, fresh="push", emit=told.append)
            comms[number].reconfigure(before)
            replica.strategy.configure(before)
            replica.round(before)
            all_have_met.wait(15)
            if number == 1:
                assert is_made.wait(15)
                net.hub.abort(2)
            else:
                monkeypatch.setattr(Owner, "_see", seeing)
                with pytest.raises(PeerLost):
                    replica.round(before, 1)
            replica.strategy.configure(None)
            if number == 2:
                return None
            comms[number].reconfigure(after)
            replica.heal(True)
            replica.strategy.configure(after)
            replica.round(after, 1)
            replica.strategy.close()
            return replica.model.weight.detach().clone()

        found = in_threads([partial(life, number) for number in before.members], 40)
    for weight in found[:2]:
        assert_counted_once(weight)
    assert [event.applied for event in told if isinstance(event, events.Staleness)] == [TURNS * 3] * 2


def test_who_copies_the_state_of_the_next_round_has_seen_nothing_of_it() -> None:
    """Pieces of all rounds are called alike."""
    membership = sized(1, 0)

    def life(replica: Replica) -> Replica:
        replica.round(membership)
        return replica

    (ahead,), (behind,) = lives(membership, life, None, rounds=2), lives(membership, life, None, rounds=2)
    (one,) = (one for held in behind.strategy._held.values() for one in held)
    assert len(one.seen) == TURNS, "it was stopped before it began another"
    ahead.strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
    behind.strategy.state_in(ahead.strategy.state_out())
    assert not one.seen


def check_nothing_is_lost(told: list[events.Event], pieces: int, after: Membership) -> None:
    """And those who serve now hold alike much."""
    (round_,) = told
    assert isinstance(round_, events.Staleness)
    assert round_.applied == pieces
    assert pieces - len(after.members) <= round_.acknowledged <= pieces, "of each worker one may have been on its way"
    assert round_.held.keys() == {str(after.members[rank]) for rank in after.owners}
    assert 0 < max(round_.held.values()) <= 1.1 * min(round_.held.values())


def test_with_one_copy_a_server_that_is_lost_in_the_middle_of_a_round_is_told() -> None:
    before, after = SERVERS_LOST["the second"]
    with pytest.raises(SlicesLost):
        broken_round(before, after, None, -1, half_pushed=2)
