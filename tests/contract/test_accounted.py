# SPDX-License-Identifier: Apache-2.0
"""What a run with staleness says of its updates: one that was acknowledged and is not there is told, whoever died."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from broken_rounds import breaks_between_owners, broken_round
from racing_rounds import TURNS, Diary, Replica, lives, sized, team
from ranks import in_threads, network
from torch import Tensor

from unisono.comm.asking import Words
from unisono.control.staleness_report import StalenessTold
from unisono.core import events
from unisono.core.errors import PeerLost, SlicesLost
from unisono.core.membership import Membership
from unisono.parallel.owner import Owner
from unisono.parallel.slices import Place

pytestmark = pytest.mark.usefixtures("one_thread_each")


def summed(told: Sequence[events.Event]) -> StalenessTold:
    found = StalenessTold()
    for event in told:
        found.take(event)
    return found


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update that reaches a server is acknowledged, and not made."""
    see: Callable[..., Any] = Owner._see
    forgotten = list[tuple[int, ...]]()

    def seeing(owner: Owner, places: Sequence[Place], words: Words) -> Any:
        if not forgotten:
            forgotten.append(words.numbers[:3])
            return [], []
        return see(owner, places, words)

    monkeypatch.setattr(Owner, "_see", seeing)


@pytest.mark.usefixtures("forgetful")
def test_an_update_that_a_server_forgets_shows_as_lost() -> None:
    told, membership = list[events.Event](), sized(2, 1)

    def life(replica: Replica) -> Tensor:
        for number in range(2):
            replica.round(membership, number)
        return replica.model.seen()

    for seen in lives(membership, life, None, rounds=2, emit=told.append):
        assert int((seen == 0).sum()) == 2, "the microbatches of one piece are missing in the weights"
    found, pieces = summed(told), 2 * TURNS * 2
    assert found.lost == 1
    assert found.updates == f"{pieces} pushed, {pieces} acknowledged, {pieces - 1} applied, 1 acknowledged LOST"


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_update_that_has_to_be_made_again_shows_as_lost_whoever_dies(lost: int) -> None:
    """Somebody dies, so it is found out, and another makes it."""
    told = list[events.Event]()
    after = team(2, [number for number in range(3) if number != lost], [3])
    broken_round(team(1, [0, 1, 2], [3]), after, lost=lost, at=5, emit=told.append)
    found = summed(told)
    assert found.applied == TURNS * 3
    assert (found.acknowledged, found.lost) == (TURNS * 3 + 1, 1)


def test_what_is_taken_back_when_a_server_is_lost_is_counted_and_known_to_all() -> None:
    """Of the rounds that are over, and what workers had been told in the one that was broken off."""
    before, after, diary = team(1, [0, 1], [2, 3]), team(2, [0, 1], [2]), Diary()
    all_know = threading.Barrier(len(after.members))

    with network("threads", 15) as net:
        comms = net.comms(before.members)

        def life(number: int) -> tuple[int, int] | None:
            replica = Replica(comms[number], None, rounds=2, delay=lambda: 0.001)
            comms[number].reconfigure(before)
            replica.strategy.configure(before)
            replica.round(before)
            replica.strategy.diary = diary
            if number == 1:
                breaks_between_owners(replica, before, 3)
            with pytest.raises(PeerLost):
                replica.round(before, 1)
            net.hub.abort(2)
            if number == 3:
                return None
            replica.strategy.configure(None)
            comms[number].reconfigure(after)
            replica.heal(True)
            with pytest.raises(SlicesLost):
                replica.strategy.configure(after)
            all_know.wait(15)
            return replica.strategy.undone(TURNS)

        found = in_threads([partial(life, number) for number in before.members], 40)
    under_way = sum(what == "end" for what, _, _ in diary.lines)
    assert under_way >= 2
    assert found == [(TURNS * 2, under_way), (TURNS * 2, under_way), (TURNS * 2, under_way), None]


def test_every_round_tells_its_own_so_a_new_first_server_takes_nothing_of_what_was_told() -> None:
    told, membership = list[events.Event](), sized(2, 2)

    def life(replica: Replica) -> None:
        for number in range(3):
            replica.round(membership, number)

    lives(membership, life, 2, rounds=3, emit=told.append)
    assert len(told) == 3
    for event in told:
        assert isinstance(event, events.Staleness)
        assert sum(event.leads.values()) == sum(event.delays.values()) == event.pushed == TURNS * 2
        assert event.steps == TURNS
    last = summed(told).last
    assert last is not None
    assert sum(last.leads.values()) == sum(last.delays.values()) == 3 * TURNS * 2


def test_a_state_that_is_put_back_where_it_was_changes_nothing_of_the_count() -> None:
    """As a training does when its callbacks have begun, in the middle of a round, too."""
    told = list[events.Event]()
    before, after = team(1, [0, 1, 2], [3]), team(2, [0, 2], [3])

    class PutBack(Replica):
        def heal(self, holds: bool) -> None:
            super().heal(holds)
            self.strategy.configure = partial(self.configure_and_put_back, self.strategy.configure)  # type: ignore[method-assign]

        def configure_and_put_back(self, configure: Callable[..., None], membership: Membership | None) -> None:
            configure(membership)
            if membership is not None:
                self.strategy.state_in(copy.deepcopy(self.strategy.state_out()))

    broken_round(before, after, lost=1, at=3, kind_of_replica=PutBack, emit=told.append)
    found = summed(told)
    assert (found.acknowledged, found.applied, found.lost) == (TURNS * 3, TURNS * 3, 0)
