# SPDX-License-Identifier: Apache-2.0
"""What the codes of a worker have not said when it stops to compute: another says it, or its loss is told."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from racing_rounds import MICROBATCHES, TURNS, WEIGHT, Replica, team
from ranks import in_threads, network
from torch import Tensor

from unisono.comm.codecs import parse_codec
from unisono.core import events
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.owing import Debts

pytestmark = pytest.mark.usefixtures("one_thread_each")

ROWS = 2_000  # wide enough for codes


def changing(before: Membership, after: Membership, leaving: int | None) -> tuple[list[Any], list[events.Notice]]:
    """A round of each team; `leaving` hands over what it holds. Of all who are left: (weights, what is unsaid)."""
    told: list[events.Notice] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.Notice):
            told.append(event)

    with network("threads", 15) as net:
        comms = net.comms(before.members)

        def life(number: int) -> tuple[Tensor, Tensor] | None:
            comm = comms[number]
            replica = Replica(comm, None, rounds=2, rows=ROWS, compression=parse_codec("topk:0.01"), emit=hear)
            comm.reconfigure(before)
            replica.strategy.configure(before)
            replica.round(before, 0)
            owes = replica.strategy._outgoing.owes
            assert owes == (comm.rank in before.workers)
            if leaving is not None:
                replica.strategy.hand_over(number == leaving)
                assert not (number == leaving and replica.strategy._outgoing.owes), "it is with another now"
            if number not in after.members:
                return None
            replica.strategy.configure(None)
            comm.reconfigure(after)
            replica.strategy.configure(after)
            assert comm.rank in after.workers or not replica.strategy._outgoing.owes
            replica.round(after, 1)
            replica.strategy.close()
            return replica.model.weight.detach().clone(), replica.unsaid

        found = in_threads([partial(life, number) for number in before.members], 40)
    return [one for one in found if one is not None], told


def everything(found: list[Any]) -> Tensor:
    """What the weights would be if all had been said: by microbatch, on every row the same."""
    return found[0][0] + torch.stack([unsaid for _, unsaid in found]).sum(0)


CHANGES = {
    "a worker leaves": (team(1, [0, 1], [2, 3]), team(2, [0], [2, 3]), 1),
    "the first worker leaves": (team(1, [0, 1, 4], [2]), team(2, [1, 4], [2]), 0),
    "a worker begins to serve": (team(1, [0, 1], [2]), team(2, [0], [1, 2]), None),
    "a worker leaves that owns slices": (team(1, [0, 1, 2]), team(2, [0, 2]), 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_codes_have_not_said_is_said_by_another(name: str) -> None:
    found, told = changing(*CHANGES[name])
    whole = everything(found)
    torch.testing.assert_close(whole, torch.full_like(whole, WEIGHT), rtol=1e-4, atol=1e-5)
    assert whole.shape == (ROWS, 2 * TURNS * MICROBATCHES)
    assert not told


def test_what_a_worker_owed_that_died_is_lost_and_told_once() -> None:
    found, told = changing(team(1, [0, 1], [2]), team(2, [0], [2]), None)
    assert float(everything(found).sum()) < 0.99 * WEIGHT * ROWS * 2 * TURNS * MICROBATCHES
    (notice,) = told
    assert notice.code == "carried-lost"
    assert "worker 1 had not sent yet was lost" in notice.text


RESUMED = {
    "the same team": (team(1, [0, 1], [2]), team(1, [0, 1], [2])),
    "one worker, more servers": (team(1, [0, 1, 2], [3]), team(1, [0], [1, 2])),
    "nobody but workers": (team(1, [0, 1], [2]), team(1, [0, 1, 2])),
}


@pytest.mark.parametrize("reading", ["all", "the last"])
@pytest.mark.parametrize("name", RESUMED)
def test_what_codes_have_not_said_when_a_checkpoint_is_saved_is_said_by_who_takes_it_up(
    name: str, reading: str
) -> None:
    """Also where one has read it, a server at that, and the others copy from it."""
    before, after = RESUMED[name]
    told: list[events.Event] = []

    def lived(membership: Membership, number_of_round: int, state: dict[str, Any] | None) -> list[Any]:
        def life(number: int) -> Any:
            comm = comms[number]
            replica = Replica(comm, None, rounds=2, rows=ROWS, compression=parse_codec("topk:0.01"), emit=told.append)
            comm.reconfigure(membership)
            if state is not None:
                mine = copy.deepcopy(state)
                if reading == "the last" and number != membership.members[-1]:
                    del mine["owed"]
                replica.strategy.state_in(mine)
            replica.strategy.configure(membership)
            replica.round(membership, number_of_round)
            found = copy.deepcopy(replica.strategy.gathered_state()), replica.unsaid
            replica.strategy.close()
            return replica.model.weight.detach().clone(), *found

        with network("threads", 15) as net:
            comms = net.comms(membership.members)
            return in_threads([partial(life, number) for number in membership.members], 40)

    first = lived(before, 0, None)
    states = [row[1] for row in first]
    assert all(torch.equal(state["owed"]["0"], states[0]["owed"]["0"]) for state in states), "writers must agree"
    assert states[0]["owed"]["0"].any()
    second = [(weight, unsaid) for weight, _, unsaid in lived(after, 1, states[0])]
    whole = everything(second)
    torch.testing.assert_close(whole, torch.full_like(whole, WEIGHT), rtol=1e-4, atol=1e-5)
    assert not [event for event in told if isinstance(event, events.Notice)]


def test_what_a_checkpoint_owes_to_other_parameters_is_dropped_and_told() -> None:
    told: list[events.Event] = []
    membership = team(1, [0], [1])

    def life(number: int) -> bool:
        comm = comms[number]
        replica = Replica(comm, None, rows=ROWS, compression=parse_codec("topk:0.01"), emit=told.append)
        comm.reconfigure(membership)
        replica.strategy.state_in({**replica.strategy.state_out(), "owed": {"0": torch.ones(3), "9": torch.ones(3)}})
        replica.strategy.configure(membership)
        owes = replica.strategy._outgoing.owes
        replica.round(membership)
        replica.strategy.close()
        return owes

    with network("threads", 15) as net:
        comms = net.comms(membership.members)
        assert in_threads([partial(life, number) for number in membership.members], 40) == [False, False]
    (notice,) = [event for event in told if isinstance(event, events.Notice)]
    assert notice.code == "carried-lost"
    assert "other parameters train now" in notice.text


class HalfHeard:
    """A Comm whose first gather comes to its end on the first rank only, because the last one dies in it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.rows = rank, [[True, False]] * 3 if rank == 0 else None

    def gather(self, _: Tensor) -> list[Tensor]:
        if self.rows is None:
            raise PeerLost("as planned")
        return [torch.tensor(row) for row in self.rows]


def test_what_a_checkpoint_owes_is_taken_up_once_though_not_all_have_heard_of_it() -> None:
    taken: list[int] = []
    layout: Any = SimpleNamespace(bucket_elements=(4,))
    debts = [Debts(lambda _: None) for _ in range(2)]
    comms: list[Any] = [HalfHeard(rank) for rank in range(2)]
    outgoing: list[Any] = [SimpleNamespace(take_over=lambda _, rank=rank: taken.append(rank)) for rank in range(2)]
    for one in debts:
        one.go_on_from({"0": torch.ones(4)})
    debts[0]._take_up(comms[0], outgoing[0], layout)
    with pytest.raises(PeerLost):
        debts[1]._take_up(comms[1], outgoing[1], layout)
    for comm in comms:
        comm.rows = [[bool(one.saved), one._took_up] for one in debts]
    for rank in range(2):
        debts[rank]._take_up(comms[rank], outgoing[rank], layout)
    assert taken == [0]
    debts[1].go_on_from({"0": torch.ones(4)})  # back to the checkpoint once more
    debts[0].go_on_from({})
    for comm in comms:
        comm.rows = [[bool(one.saved), one._took_up] for one in debts]
    debts[1]._take_up(comms[1], outgoing[1], layout)
    assert taken == [0, 1]
