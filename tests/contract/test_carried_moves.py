# SPDX-License-Identifier: Apache-2.0
"""States of microbatches move between real Comms: joins, leaves, deaths, changes in a row, and breaks on the way.

A crew trains: each step multiplies a microbatch's state and adds to it, so one that was missed, done twice or mixed up
shows. What the states must be is computed beside it, by microbatch, as if nothing ever happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from ranks import INTERRUPTIBLE, KINDS, Network, in_threads, network
from torch import Tensor

from unisono.comm.faulty import FaultyComm
from unisono.core.errors import PeerLost, ReplicasDisagree
from unisono.core.membership import Membership, even
from unisono.parallel.carried import Carried

M = 7
State = dict[str, Tensor]


def fresh(microbatch: int) -> State:
    residual = torch.arange(40, dtype=torch.float64) + microbatch
    return {"residual": residual, "seen": torch.tensor(False), "0.exp": torch.full((2, 3), float(microbatch))}


def advance(state: State, microbatch: int, step: int) -> None:
    if not state:
        return
    state["residual"].mul_(3).add_(microbatch + step).remainder_(1009)
    state["0.exp"].add_(1)
    state["seen"].fill_(True)


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Died(Exception):
    pass


@dataclass
class Crew:
    """Does what sessions and strategies do: forms generations, passes the newest stamp on, makes steps."""

    net: Network
    generation: int = 0
    members: tuple[int, ...] = ()
    step: int = 0
    carried: dict[int, Carried] = field(default_factory=dict)
    truth: dict[int, State] = field(default_factory=lambda: {microbatch: fresh(microbatch) for microbatch in range(M)})
    on_collective: dict[int, Callable[[], None]] = field(default_factory=dict)
    fresh: Callable[[int], State] = fresh

    def join(self, *workers: int) -> None:
        for worker in workers:
            comm = FaultyComm(self.net.comm(worker), partial(self._collective, worker))
            self.carried[worker] = Carried(comm, self.fresh)

    def _collective(self, worker: int) -> None:
        self.on_collective.get(worker, lambda: None)()

    def die(self, worker: int) -> None:
        self.carried.pop(worker).comm.close()

    def place(self, members: Sequence[int], ranges: Sequence[range] | None = None) -> Membership:
        self.generation += 1
        self.members = tuple(members)
        plain = Membership(self.generation, self.members, tuple(ranges)) if ranges else None
        return self.net.place(plain or even(self.generation, self.members, M))

    def form(self, members: Sequence[int], ranges: Sequence[range] | None = None) -> tuple[int, ...]:
        """What was lost; raises PeerLost when the generation breaks. All members hear that it is over, as from the
        coordinator."""
        membership = self.place(members, ranges)
        newest = max(self.carried[worker].stamp for worker in members)
        broken: list[PeerLost] = []

        def enter(worker: int) -> tuple[int, ...] | None:
            carried = self.carried[worker]
            try:
                carried.comm.reconfigure(membership)
                carried.take_stamp(newest)
                return carried.configure(membership)
            except (PeerLost, Died) as error:
                if isinstance(error, PeerLost):
                    broken.append(error)
                for other in members:
                    self.carried[other].comm.abort(membership.generation + 1)
                if isinstance(error, Died):
                    broken.append(PeerLost(f"worker {worker} died"))
                return None

        results = in_threads([partial(enter, worker) for worker in members])
        if broken:
            raise broken[0]
        assert all(result == results[0] for result in results), "all hear the same"
        for microbatch in results[0]:
            self.truth[microbatch] = self.fresh(microbatch)
        return tuple(results[0])

    def part(self, *leaving: int) -> None:
        """At a step boundary: those who leave are still there."""
        in_threads([partial(self.carried[worker].hand_over, worker in leaving) for worker in self.members])

    def work(self, steps: int = 1, committed_by: Sequence[int] | None = None) -> None:
        """`committed_by`: the generation breaks when only these have heard that the step is complete."""
        for _ in range(steps):
            self.step += 1
            for worker in self.members:
                carried = self.carried[worker]
                carried.begin()
                for microbatch in carried.mine:
                    if (microbatch + self.step) % 5:  # one without samples stays as it is
                        advance(carried.stage(microbatch), microbatch, self.step)
            for worker in self.members if committed_by is None else committed_by:
                self.carried[worker].commit()
            if committed_by is None or committed_by:
                for microbatch, state in self.truth.items():
                    if (microbatch + self.step) % 5:
                        advance(state, microbatch, self.step)
            else:
                self.step -= 1

    def check(self) -> None:
        seen: list[int] = []
        for worker in self.members:
            for microbatch, state in self.carried[worker].mine.items():
                assert equal(state, self.truth[microbatch]), f"microbatch {microbatch} on worker {worker}"
                seen.append(microbatch)
        assert sorted(seen) == list(range(M))

    def owners(self) -> dict[int, int]:
        return next(self.carried[worker].holders for worker in self.members if worker in self.carried)

    def close(self) -> None:
        for worker in list(self.carried):
            self.die(worker)


@pytest.mark.parametrize("kind", KINDS)
class TestMoves:
    def test_joins_leaves_and_other_ranges_change_no_state(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2, 3)
            assert crew.form([0, 1]) == ()
            crew.work(2)
            for members, ranges in [
                ([0, 1, 2, 3], None),
                ([3, 1], None),
                ([1, 3, 0], [range(5), range(5, 6), range(6, 7)]),
                ([0], None),
                ([2, 0, 1], None),
            ]:
                crew.part(*set(crew.members) - set(members))
                assert crew.form(members, ranges) == ()
                crew.check()
                crew.work(2)
                crew.check()
            crew.close()

    def test_who_dies_takes_its_share_along_and_nobody_elses(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2)
            crew.form([0, 1, 2])
            crew.work(2)
            gone = [microbatch for microbatch, worker in crew.owners().items() if worker == 1]
            crew.die(1)
            crew.join(4)
            assert crew.form([0, 4, 2]) == tuple(gone)
            crew.check()
            crew.work()
            assert crew.form([2, 0, 4]) == (), "told once"
            crew.check()
            crew.close()

    def test_two_changes_in_a_row_without_a_step_between(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2)
            crew.form([0, 1])
            crew.work(3)
            crew.form([0, 1, 2])
            taken = [microbatch for microbatch, worker in crew.owners().items() if worker == 2]
            assert taken
            crew.die(2)
            assert crew.form([1, 0]) == (), "those who gave it still have it"
            crew.check()
            crew.work()
            crew.check()
            crew.close()

    def test_before_the_first_step_nothing_can_be_lost(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2)
            crew.form([0, 1, 2])
            crew.die(0)
            crew.join(3)
            assert crew.form([3, 1]) == ()
            crew.check()
            crew.close()

    def test_one_who_was_told_of_a_step_by_others_still_has_its_own_share_of_it(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2)
            crew.form([0, 1, 2])
            crew.work(2)
            crew.work(committed_by=[1])
            assert crew.form([0, 1, 2]) == ()
            crew.check()
            crew.work(committed_by=[])  # nobody got to the end of it
            assert crew.form([2, 1, 0]) == ()
            crew.check()
            crew.part(0)
            assert crew.form([2, 1]) == ()
            crew.work()
            crew.work(committed_by=[1])
            gone = [microbatch for microbatch, worker in crew.owners().items() if worker == 2]
            crew.die(2)
            assert crew.form([0, 1]) == tuple(gone)
            crew.check()
            crew.close()

    def test_a_rank_that_carries_nothing_itself_hears_what_its_replica_has_lost(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net, truth={microbatch: {} for microbatch in range(M)}, fresh=lambda _: {})
            crew.join(0, 1, 2)
            for carried in crew.carried.values():
                carried.goes_along = True
            crew.form([0, 1])
            crew.work()
            crew.part(1)
            assert crew.form([0, 2]) == ()
            crew.work()
            gone = [microbatch for microbatch, worker in crew.owners().items() if worker == 2]
            crew.die(2)
            assert crew.form([0]) == tuple(gone)
            crew.check()
            crew.close()

    def test_a_checkpoint_is_read_by_those_who_see_it_for_those_who_do_not(self, kind: str) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2)
            read: list[int] = []

            def reader(microbatch: int) -> State:
                read.append(microbatch)
                return {name: tensor.clone() for name, tensor in crew.truth[microbatch].items()}

            for microbatch, state in crew.truth.items():
                advance(state, microbatch, 40)
            for worker in (0, 2):
                crew.carried[worker].begin_from(40, reader)
            assert crew.form([0, 1, 2]) == ()
            assert sorted(read) == list(range(M)), "each once, by whoever needs it or gives it"
            crew.check()
            crew.die(0)  # nothing has happened since: the checkpoint still has it
            assert crew.form([1, 2]) == ()
            crew.check()
            crew.work()
            crew.check()
            crew.close()


def breaking_at(number: int, error: Exception) -> Callable[[], None]:
    left = [number]

    def reach() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    return reach


@pytest.mark.parametrize("kind", INTERRUPTIBLE)
class TestBreaks:
    @pytest.mark.parametrize("who", [0, 1, 2, 3])
    @pytest.mark.parametrize("collective", [1, 2, 3])
    def test_a_generation_that_breaks_in_the_middle_of_a_move_loses_nothing(
        self, kind: str, who: int, collective: int
    ) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2, 3)
            crew.form([0, 1])
            crew.work(3)
            crew.on_collective[who] = breaking_at(collective, PeerLost("a cable"))
            for _ in range(2):  # it may not get that far in the first
                try:
                    assert crew.form([2, 3, 1, 0]) == ()
                except PeerLost:
                    continue
            crew.on_collective.clear()
            assert crew.form([3, 0, 2, 1]) == ()
            crew.check()
            crew.work()
            crew.check()
            crew.close()

    @pytest.mark.parametrize("collective", [1, 2, 3])
    def test_whoever_dies_in_the_middle_of_a_move_takes_only_what_nobody_else_has(
        self, kind: str, collective: int
    ) -> None:
        with network(kind) as net:
            crew = Crew(net)
            crew.join(0, 1, 2)
            crew.form([0, 1])
            crew.work(3)
            mine = {microbatch for microbatch, worker in crew.owners().items() if worker == 1}
            crew.on_collective[1] = breaking_at(collective, Died())
            with pytest.raises(PeerLost):
                crew.form([2, 1, 0])
            crew.die(1)
            lost = crew.form([0, 2])
            assert set(lost) <= mine
            if collective == 1:
                assert set(lost) == mine, "nothing had moved"
            crew.check()
            crew.work()
            crew.check()
            crew.close()


@pytest.mark.parametrize("seed", [*range(20), 86])
def test_any_history_gives_the_same_states_and_loses_only_what_the_dead_had(seed: int) -> None:
    chance = random.Random(seed)
    with network("threads") as net:
        crew = Crew(net)
        crew.join(*range(3))
        spare = 3
        crew.form([0, 1, 2])
        told: set[int] = set()
        for _ in range(25):
            before, owners, dead, left = crew.step, crew.owners(), list[int](), list[int]()
            crew.work(chance.randrange(3))
            if chance.random() < 0.4:
                who = chance.sample(crew.members, chance.randint(0, len(crew.members)))
                crew.work(committed_by=sorted(who))
            elif len(crew.members) > 2 and chance.random() < 0.4:
                left = [chance.choice(crew.members)]
                crew.part(*left)
                crew.die(*left)
            staying = list(crew.carried)
            if len(staying) > 2 and chance.random() < 0.4:
                newest = max(carried.stamp for carried in crew.carried.values())
                safe = [w for w in staying if crew.carried[w].stamp == newest]
                dead = [w for w in chance.sample(staying, 1) if safe != [w]]
                for worker in dead:
                    crew.die(worker)
            if len(crew.carried) < 5 and chance.random() < 0.5:
                crew.join(spare)
                spare += 1
            lost = set(_form_somehow(crew, chance))
            told = told if crew.step == before else set()  # told again until a step has been made
            at_risk = {*dead, *left} if dead else set()  # what one who left has given away may be with one who died
            assert {owners[microbatch] for microbatch in lost - told} <= at_risk
            told |= lost
            crew.check()
        crew.close()


def _form_somehow(crew: Crew, chance: random.Random) -> tuple[int, ...]:
    """Some generations break while they form; nobody dies of it. In the end, one holds."""
    while True:
        members = list(crew.carried)
        chance.shuffle(members)
        if chance.random() < 0.4:
            crew.on_collective[chance.choice(members)] = breaking_at(chance.randint(1, 3), PeerLost("a cable"))
        try:
            return crew.form(members)
        except PeerLost:
            continue
        finally:
            crew.on_collective.clear()


def test_workers_whose_states_have_other_shapes_are_told_apart() -> None:
    with network("threads") as net:
        crew = Crew(net)
        crew.join(0, 1)
        crew.carried[1] = Carried(crew.carried[1].comm, lambda _: {"residual": torch.zeros(3)})
        with pytest.raises(ReplicasDisagree, match="other shapes"):
            crew.form([0, 1])
        crew.close()
