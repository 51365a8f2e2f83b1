# SPDX-License-Identifier: Apache-2.0
"""Workers that do not wait for each other: the bound holds, and every piece counts once, whoever is lost on the way.

`Columns` is a model that keeps its own record: each microbatch of the training has a column, to which its update adds
its weight. So the weights say which updates they have seen, on every owner, and the record is not the clock's.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.asking import Words
from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost, SlicesLost
from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.clock import Piece
from unisono.parallel.owner import PUSH
from unisono.parallel.strategy import Microbatch

MICROBATCHES, TURNS, ROWS = 4, 6, 60
WEIGHT = 1 / MICROBATCHES
LONGEST_S = 0.004  # that a microbatch computes


@pytest.fixture(autouse=True)
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def team(generation: int, workers: Sequence[int], servers: Sequence[int] = ()) -> Membership:
    ranges = [*split(MICROBATCHES, len(workers)), *[range(MICROBATCHES, MICROBATCHES) for _ in servers]]
    return Membership(generation, (*workers, *servers), tuple(ranges))


def sized(workers: int, servers: int) -> Membership:
    return team(1, range(workers), range(workers, workers + servers))


class Columns(nn.Module):
    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, rounds * TURNS * MICROBATCHES))  # every owner has whole rows

    def loss(self, step: int, index: int) -> Tensor:
        return -self.weight[:, step * MICROBATCHES + index].sum()

    def seen(self) -> Tensor:
        """By step and microbatch, on how many rows its update was made: (steps, M)."""
        return (self.weight.detach() != 0).sum(0).view(-1, MICROBATCHES)


class Diary:
    """What happened in which order, by our own account."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Piece, Tensor | None]] = []
        self.lock = threading.Lock()

    def write(self, what: str, piece: Piece, seen: Tensor | None = None) -> None:
        with self.lock:
            self.lines.append((what, piece, seen))

    def farthest(self, turns: int = TURNS) -> int:
        """The most steps that a piece was ahead of the oldest one that was not pushed when it began."""
        pieces = {piece for what, piece, _ in self.lines if what == "begin"}
        assert {turn for turn, _, _ in pieces} == set(range(turns))
        left, most = set(pieces), 0
        for what, piece, _ in self.lines:
            if what == "begin":
                most = max(most, piece.turn - min(one.turn for one in left))
            else:
                left.discard(piece)
        return most


class Watched(Asynchronous):
    diary: Diary | None = None

    def _begin_piece(self, piece: Piece) -> None:
        if self.diary is not None:
            seen = self.model.seen() if isinstance(self.model, Columns) else None
            self.diary.write("begin", piece, seen)
        super()._begin_piece(piece)

    def _push(self, piece: Piece) -> None:
        super()._push(piece)
        if self.diary is not None:
            self.diary.write("end", piece)


class Died(Exception):
    """As a process does: it says nothing more."""


Delay = Callable[[], float]


class Replica:
    def __init__(self, comm: Comm, bound: int | None, copies: int = 1, rounds: int = 1, delay: Delay = float) -> None:
        self.comm, self.model, self.delay = comm, Columns(rounds), delay
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.strategy = Watched(self.model, self.optimizer, comm, bound=bound, copies=copies)
        self.computed = 0
        self.dies_at = -1

    def round(self, membership: Membership, number: int = 0) -> None:
        self.strategy.begin_step([WEIGHT] * MICROBATCHES)
        for index, turn in self.strategy.work(membership.ranges[self.comm.rank], TURNS):
            step = number * TURNS + turn
            self.strategy.forward_backward(Microbatch(step, index, WEIGHT), partial(self.compute, step, index))
        self.strategy.step(self.strategy.reduce([]).loss, lambda: 0.0)

    def compute(self, step: int, index: int) -> Tensor:
        if self.computed == self.dies_at:
            raise Died
        self.computed += 1
        time.sleep(self.delay())
        return self.model.loss(step, index)

    def heal(self, holds: bool) -> None:
        """As the session does: those who have no state copy it from one who has."""
        mine = {"holds": holds, "state": self.strategy.state_out() if holds else {}}
        trees = hand_round(self.comm, mine, range(self.comm.size), 1 << 26)
        donor = next((tree for tree in trees if tree["holds"]), None)
        if donor is not None and not holds:
            self.strategy.state_in(copy.deepcopy(donor["state"]))


def lives(
    membership: Membership,
    life: Callable[[Replica], Any],
    bound: int | None,
    kind: str = "threads",
    copies: int = 1,
    rounds: int = 1,
    seed: int = 0,
    slow: Sequence[int] = (),
) -> list[Any]:
    """What `life` returned for each member, with a strategy that is ready for the first round. Slow ones take ten
    times as long."""
    with network(kind, 15) as net:
        comms = net.comms(membership.members)
        placed = net.place(membership)

        def run(number: int) -> Any:
            draw = random.Random(100 * seed + number)
            replica = Replica(
                comms[number], bound, copies, rounds, lambda: draw.random() * LONGEST_S * (10 if number in slow else 1)
            )
            try:
                comms[number].reconfigure(placed)
                replica.strategy.configure(placed)
                return life(replica)
            except BaseException:
                for comm in comms.values():
                    comm.abort(99)
                raise
            finally:
                replica.strategy.close()

        try:
            return in_threads([partial(run, number) for number in membership.members], 40)
        finally:
            for comm in comms.values():
                comm.close()


def assert_counted_once(weight: Tensor) -> None:
    torch.testing.assert_close(weight, torch.full_like(weight, WEIGHT), rtol=1e-5, atol=1e-6)


# --- the bound, and each piece once


@pytest.mark.parametrize("bound", [1, 2, 3, None])
@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 0), (4, 0), (2, 1), (3, 2), (4, 3)])
def test_under_random_delays_the_bound_holds_and_every_piece_counts_once_on_every_owner(
    bound: int | None, workers: int, servers: int
) -> None:
    membership, diary = sized(workers, servers), Diary()

    def life(replica: Replica) -> tuple[Tensor, Any]:
        replica.strategy.diary = diary
        for number in range(2):
            replica.round(membership, number)
        return replica.model.weight.detach().clone(), replica.strategy.tallies

    found = lives(membership, life, bound, rounds=2, slow=[0] if workers > 1 else [])
    for weight, _ in found:
        assert_counted_once(weight)
        assert torch.equal(weight, found[0][0])
    pushes = 2 * TURNS * workers
    for rank in membership.owners:
        assert sum(found[rank][1].delays.values()) == found[rank][1].updates == pushes
    leads = found[membership.owners[0]][1].leads
    assert sum(leads.values()) == pushes
    halves = [Diary(), Diary()]
    halves[0].lines, halves[1].lines = diary.lines[: 2 * pushes // 2], diary.lines[2 * pushes // 2 :]
    farthest = max(half.farthest() for half in halves)
    if bound is not None:
        assert max(leads) <= bound
        assert farthest <= bound


@pytest.mark.parametrize(("bound", "reached"), [(1, 1), (2, 2), (None, TURNS - 1)])
def test_a_slow_worker_lets_the_others_run_ahead_as_far_as_the_bound(bound: int | None, reached: int) -> None:
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

    assert max(lives(membership, life, bound)[2]) == reached


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2), (3, 0)])
def test_what_a_worker_computes_on_has_seen_all_that_is_older_than_the_bound(
    bound: int, workers: int, servers: int
) -> None:
    """Ho et al. 2013: who is at step t reads the updates of all steps before t - s, whoever made them."""
    membership, diary = sized(workers, servers), Diary()

    def life(replica: Replica) -> None:
        replica.strategy.diary = diary
        replica.round(membership)

    lives(membership, life, bound, slow=[1])
    for what, piece, seen in diary.lines:
        if what == "begin" and piece.turn > bound:
            assert seen is not None
            missing = (seen[: piece.turn - bound] != ROWS).nonzero().tolist()
            assert not missing, f"{piece} began without the updates of {missing}"


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("workers", "servers", "bound"), [(2, 0, None), (3, 2, 1), (2, 3, None)])
def test_over_shared_memory_and_with_copies_every_piece_counts_once(
    copies: int, workers: int, servers: int, bound: int | None
) -> None:
    membership = sized(workers, servers)

    def life(replica: Replica) -> Tensor:
        for number in range(2):
            replica.round(membership, number)
        return replica.model.weight.detach().clone()

    for weight in lives(membership, life, bound, "mesh", copies, rounds=2):
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


# --- somebody is lost in the middle of a round


def broken_round(
    before: Membership,
    after: Membership,
    lost: int | None,
    at: int,
    copies: int = 1,
    bound: int | None = None,
    seed: int = 0,
    half_pushed: int = 0,
) -> list[Tensor]:
    """`lost` dies while it computes its microbatch `at`; the rest, and those who come, finish the round as `after`.

    `half_pushed`: the worker at rank 1 has pushed so many pieces when it loses the second owner, but not the first.
    """
    with network("threads", 15) as net:
        everyone = sorted({*before.members, *after.members})
        comms = net.comms(everyone)

        def life(number: int) -> Tensor | None:
            draw = random.Random(100 * seed + number)
            replica = Replica(comms[number], bound, copies, delay=lambda: draw.random() * LONGEST_S)
            holds = number in before.members
            if holds:
                replica.dies_at = at if number == lost else -1
                comms[number].reconfigure(before)
                replica.heal(False)
                replica.strategy.configure(before)
                if half_pushed and number == before.members[1]:
                    breaks_between_owners(replica, before, half_pushed)
                try:
                    replica.round(before)
                    raise AssertionError("the round should have broken")
                except (Died, PeerLost) as error:
                    net.hub.abort(2)
                    if isinstance(error, Died):
                        return None
                    replica.strategy.configure(None)
                if number not in after.members:
                    return None
            comms[number].reconfigure(after)
            replica.heal(holds)
            replica.strategy.configure(after)
            replica.round(after)
            replica.strategy.close()
            return replica.model.weight.detach().clone()

        found = in_threads([partial(life, number) for number in everyone], 40)
    return [one for one in found if one is not None]


def breaks_between_owners(replica: Replica, membership: Membership, pushes: int) -> None:
    begin, pushed = replica.strategy._begin_asking, [0]

    def ask(rank: int, words: Words) -> Callable[[], Words]:
        if words.what == PUSH and rank == membership.owners[1]:
            pushed[0] += 1
            if pushed[0] == pushes:
                raise PeerLost("as planned")
        return begin(rank, words)

    replica.strategy._begin_asking = ask  # type: ignore[method-assign]


LOSSES = {
    "a worker": (team(1, [0, 1, 2], [3]), team(2, [0, 2], [3])),
    "the first worker": (team(1, [1, 0, 2], [3, 4]), team(2, [0, 2], [3, 4])),
    "a worker, and another comes": (team(1, [0, 1], [3, 4]), team(2, [0, 5], [3, 4])),
    "a worker, and a worker begins to serve": (team(1, [0, 1, 2], [3]), team(2, [0], [2, 3])),
    "a worker, and who comes serves": (team(1, [0, 1], [2]), team(2, [0], [2, 3])),
}


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bound", [1, None])
def test_when_a_worker_is_lost_the_rest_finish_the_round_and_every_piece_counts_once(
    name: str, at: int, bound: int | None
) -> None:
    before, after = LOSSES[name]
    found = broken_round(before, after, lost=1, at=at, bound=bound, seed=at)
    assert len(found) == len(after.members)
    for weight in found:
        assert_counted_once(weight)


@pytest.mark.parametrize("pushes", [1, 2, 4])
@pytest.mark.parametrize("after", [team(2, [0, 1], [2, 3]), team(2, [1], [2, 3]), team(2, [0, 1], [3, 2])])
def test_a_piece_that_one_owner_has_seen_and_the_other_has_not_counts_once_on_both(
    pushes: int, after: Membership
) -> None:
    for weight in broken_round(team(1, [0, 1], [2, 3]), after, None, -1, half_pushed=pushes):
        assert_counted_once(weight)


SERVERS_LOST = {
    "the second": (team(1, [0, 1], [2, 3]), team(2, [0, 1], [2])),
    "the first": (team(1, [0, 1], [2, 3]), team(2, [0, 1], [3])),
    "one of three": (team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 4])),
    "one, and a worker takes its place": (team(1, [0, 1], [2, 3]), team(2, [0], [1, 2])),
    "one, and who comes takes its place": (team(1, [0, 1], [2, 3]), team(2, [0, 1], [2, 5])),
}


@pytest.mark.parametrize("name", SERVERS_LOST)
@pytest.mark.parametrize("pushes", [1, 3])
def test_with_two_copies_a_server_may_be_lost_in_the_middle_of_a_round(name: str, pushes: int) -> None:
    before, after = SERVERS_LOST[name]
    for weight in broken_round(before, after, None, -1, copies=2, half_pushed=pushes):
        assert_counted_once(weight)


def test_with_one_copy_a_server_that_is_lost_in_the_middle_of_a_round_is_told() -> None:
    before, after = SERVERS_LOST["the second"]
    with pytest.raises(SlicesLost):
        broken_round(before, after, None, -1, half_pushed=2)


# --- against plain training


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)
        self.norm: nn.Module = nn.BatchNorm1d(40) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, 6, generator=seeded), torch.randint(0, 3, (3,), generator=seeded)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def trained(
    model: nn.Module,
    optimizer: str,
    membership: Membership,
    rounds: int,
    kind: str = "threads",
    freeze_at: int = 99,
) -> list[tuple[nn.Module, list[float], dict[str, Any]]]:
    """Model, losses and gathered state of each rank."""
    with network(kind, 15) as net:
        comms = net.comms(membership.members)
        placed, parts = net.place(membership), [WEIGHT] * MICROBATCHES

        def life(number: int) -> tuple[nn.Module, list[float], dict[str, Any]]:
            own = copy.deepcopy(model)
            strategy = Asynchronous(own, OPTIMIZERS[optimizer](own), comms[number])
            comms[number].reconfigure(placed)
            strategy.configure(placed)
            losses = []
            for number_of_round in range(rounds):
                if number_of_round == freeze_at:
                    own.first.requires_grad_(False)  # type: ignore[operator, union-attr]
                strategy.begin_step(parts)
                for index, turn in strategy.work(placed.ranges[comms[number].rank], TURNS):
                    step = number_of_round * TURNS + turn
                    compute = partial(loss_of, own, step, index)
                    strategy.forward_backward(Microbatch(step, index, WEIGHT), compute)
                losses.append(strategy.reduce([]).loss)
                strategy.step(losses[-1], lambda: 0.0)
            state = copy.deepcopy(strategy.gathered_state())
            strategy.close()
            return own, losses, state

        try:
            return in_threads([partial(life, number) for number in membership.members], 40)
        finally:
            for comm in comms.values():
                comm.close()


def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
    inputs, targets = batch_of(step, index)
    return nn.functional.cross_entropy(model(inputs), targets)


def plainly(model: nn.Module, optimizer: str, rounds: int, freeze_at: int = 99) -> tuple[nn.Module, list[float], Any]:
    own = copy.deepcopy(model)
    update, losses = OPTIMIZERS[optimizer](own), []
    for step in range(rounds * TURNS):
        if step == freeze_at * TURNS:
            own.first.requires_grad_(False)  # type: ignore[operator, union-attr]
        update.zero_grad()
        loss = torch.stack([loss_of(own, step, index) for index in range(MICROBATCHES)]).mean()
        loss.backward()
        update.step()
        losses.append(float(loss.detach()))
    means = [sum(losses[TURNS * at : TURNS * (at + 1)]) / TURNS for at in range(rounds)]
    return own, means, update.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("servers", [0, 1, 2, 3])
@pytest.mark.parametrize("freeze_at", [99, 1])
def test_one_worker_with_one_piece_a_step_trains_as_plain_pytorch_does(
    optimizer: str, servers: int, freeze_at: int
) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, losses, state = plainly(model, optimizer, 3, freeze_at)
    for own, found, gathered in trained(model, optimizer, sized(1, servers), 3, freeze_at=freeze_at):
        for mine, other in zip(own.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert found == pytest.approx(losses, rel=1e-5)
        entries = gathered["optimizer"]["state"]
        assert entries.keys() == state["state"].keys()
        for position, kept in entries.items():
            for name, value in kept.items():
                torch.testing.assert_close(value, state["state"][position][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("workers", "servers", "kind"), [(1, 1, "threads"), (3, 0, "threads"), (3, 2, "mesh")])
def test_at_the_end_of_a_round_everybody_has_the_same_weights_and_buffers(
    workers: int, servers: int, kind: str
) -> None:
    torch.manual_seed(0)
    model = Net(norm=True)
    found = trained(model, "adamw", sized(workers, servers), 2, kind)
    for own, losses, state in found:
        assert losses == found[0][1]
        for name, value in own.state_dict().items():
            assert torch.equal(value, found[0][0].state_dict()[name]), name
        assert str(state["optimizer"]) == str(found[0][2]["optimizer"])
    assert not torch.equal(found[0][0].norm.running_mean, torch.zeros(40))  # type: ignore[arg-type, union-attr]
    assert found[0][0].norm.running_var.isfinite().all()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["threads", "mesh"])
def test_the_loss_of_a_model_that_is_smaller_than_a_slice_is_told(servers: int, kind: str) -> None:
    """Some owners have nothing to own."""

    class Small(Net):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.first, self.last, self.norm = nn.Identity(), nn.Linear(6, 3), nn.Identity()  # type: ignore[assignment]

    torch.manual_seed(0)
    model = Small()
    for _, losses, _ in trained(model, "sgd", sized(2, servers), 2, kind):
        assert losses[0] == pytest.approx(1.2, abs=0.4)
        assert losses[1] == pytest.approx(1.2, abs=0.4)


def test_several_workers_learn_about_as_much_as_all_reduce_does() -> None:
    torch.manual_seed(0)
    model = Net()
    expected, _, _ = plainly(model, "sgd", 3)
    moved = [other - before for other, before in zip(expected.parameters(), model.parameters(), strict=True)]
    for own, _, _ in trained(model, "sgd", sized(4, 1), 3):
        ours = [mine - before for mine, before in zip(own.parameters(), model.parameters(), strict=True)]
        for mine, other in zip(ours, moved, strict=True):
            assert float((mine - other).norm()) < 0.2 * float(other.norm())
    assert issubclass(Asynchronous, AllReduce)
