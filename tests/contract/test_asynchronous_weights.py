# SPDX-License-Identifier: Apache-2.0
"""How weights come to workers that do not wait for each other: the newest, slice by slice, and no slice twice."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from counted_bytes import LAYER, sent_in_a_round
from racing_rounds import LONGEST_S, MICROBATCHES, ROWS, TURNS, WAYS, Replica, lives, sized
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.asking import Words
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.clock import Piece
from unisono.parallel.owner import Owner
from unisono.parallel.strategy import Microbatch
from unisono.parallel.views import owned_by

pytestmark = pytest.mark.usefixtures("one_thread_each")
FRESH = pytest.mark.parametrize("fresh", ["pull", "push"])


# --- only what has changed travels


@pytest.mark.parametrize(("servers", "layers"), [(1, 2 + 2 + 1 + 2 + 2), (2, 5 + 0.5)])
def test_a_slice_that_a_worker_has_is_not_sent_again(servers: int, layers: float) -> None:
    """Each piece but the first comes with the slice that the piece before has changed: of one server, a bucket; two
    servers have a layer each of the first bucket, and the second is also asked when the round turns out to be over.
    Without versions it would be 15 layers."""
    sent = sent_in_a_round(servers, "pull")
    assert sum(sent[rank] for rank in range(1, 1 + servers)) == pytest.approx(layers * LAYER, abs=1000)
    assert sent[0] == pytest.approx(3 * TURNS * LAYER, abs=1000), "all gradients"


def test_what_is_pushed_is_what_has_changed_too() -> None:
    """Also what the last piece has changed, if there was time for it; and changes that follow each other may come
    together."""
    assert sent_in_a_round(1, "push")[1] <= (2 + 2 + 1 + 2 + 2 + 1) * LAYER + 1000


def test_a_worker_that_owns_everything_sends_nothing() -> None:
    assert sum(sent_in_a_round(0, "push").values()) == 0


# --- the newest, and whole


@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (3, 2), (2, 0)])
def test_what_is_pulled_has_seen_every_update_that_was_acknowledged_before_the_piece_was_asked_for(
    workers: int, servers: int
) -> None:
    membership, ended = sized(workers, servers), list[Piece]()
    missing: list[tuple[Piece, Piece]] = []
    looked = [0]

    def life(replica: Replica) -> None:
        begin, push, before = replica.strategy._begin_piece, replica.strategy._push, list[Piece]()

        def look(piece: Piece) -> None:
            seen = replica.model.seen()
            looked[0] += len(before)
            missing.extend((piece, one) for one in before if (seen[one.turn, one.first : one.last] != ROWS).any())
            begin(piece)

        def note(piece: Piece) -> None:
            push(piece)
            ended.append(piece)
            before[:] = list(ended)

        replica.strategy._begin_piece = look  # type: ignore[method-assign]
        replica.strategy._push = note  # type: ignore[method-assign]
        replica.round(membership)

    lives(membership, life, None, slow=[1])
    assert looked[0] > TURNS * workers
    assert not missing


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2), (2, 0)])
def test_what_is_pushed_may_come_late_but_a_worker_has_all_of_its_own_updates_but_the_last(
    workers: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership, tell = sized(workers, servers), Owner._tell_news

    def tell_late(owner: Owner, rank: int, question: Words) -> Words:
        time.sleep(4 * LONGEST_S)
        return tell(owner, rank, question)

    def life(replica: Replica) -> tuple[int, int]:
        begin, own, missing = replica.strategy._begin_piece, list[Piece](), list[int]()

        def look(piece: Piece) -> None:
            seen = replica.model.seen()
            lacks = [(seen[one.turn, one.first : one.last] != ROWS).any().item() for one in own]
            missing.append(sum(lacks))
            assert not any(lacks[:-1]), f"{piece} began without {own[lacks.index(True)]}, and has {own}"
            own.append(piece)
            begin(piece)

        replica.strategy._begin_piece = look  # type: ignore[method-assign]
        replica.round(membership)
        return len(missing), sum(missing)

    monkeypatch.setattr(Owner, "_tell_news", tell_late)
    found = lives(membership, life, None, fresh="push")[:workers]
    assert sum(pieces for pieces, _ in found) == TURNS * workers
    assert not servers or sum(missing for _, missing in found) > workers, "the last one was waited for too"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (3, 2), (2, 3), (3, 0)])
def test_a_worker_never_computes_on_half_of_a_slice(workers: int, servers: int, way: str) -> None:
    """All that one owner has of a bucket has seen the same updates."""
    membership = sized(workers, servers)
    torn: list[Piece] = []

    def life(replica: Replica) -> None:
        begin = replica.strategy._begin_piece

        def look(piece: Piece) -> None:
            gradients = replica.strategy._gradients
            assert gradients is not None
            for rank in membership.owners:
                for bucket, start, stop in owned_by(rank, gradients.layout, membership):
                    (position,) = gradients.layout.members(bucket)
                    weight = gradients.parameters[position].detach()
                    columns = torch.arange(weight.numel()) % weight.shape[1]
                    seen = torch.bincount(columns[start:stop], weight.flatten()[start:stop] != 0)
                    if not ((seen == 0) | (seen == torch.bincount(columns[start:stop]))).all():
                        torn.append(piece)
            begin(piece)

        replica.strategy._begin_piece = look  # type: ignore[method-assign]
        for number in range(2):
            replica.round(membership, number)

    lives(membership, life, None, rounds=2, **WAYS[way])
    assert not torn


# --- several dtypes


@FRESH
@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("kind", ["threads", "mesh"])
def test_parameters_of_several_dtypes_are_trained(workers: int, servers: int, kind: str, fresh: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.wide = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(500).double())
            self.narrow = nn.Parameter(torch.zeros(200).bfloat16())

        def loss(self) -> Tensor:
            return -(self.usual.sum() + self.wide.sum().float() + self.narrow.sum().float())

    membership = sized(workers, servers)

    def life(number: int) -> None:
        model, comm = Mixed(), comms[number]
        strategy = Asynchronous(model, torch.optim.SGD(model.parameters(), 1.0), comm, fresh=fresh)
        comm.reconfigure(placed)
        strategy.configure(placed)
        for _ in range(2):
            strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index, turn in strategy.work(placed.ranges[comm.rank], TURNS):
                strategy.forward_backward(Microbatch(turn, index, 1 / MICROBATCHES), model.loss)
            strategy.reduce([])
            strategy.step(0.0, float)
        strategy.close()
        for parameter in model.parameters():
            found = parameter.detach().double()
            torch.testing.assert_close(found, torch.full_like(found, 2.0 * TURNS), rtol=0.02, atol=0.0)

    with network(kind, 15) as net:
        comms = net.comms(membership.members)
        placed = net.place(membership)
        try:
            in_threads([partial(life, number) for number in membership.members], 40)
        finally:
            for comm in comms.values():
                comm.close()


# --- parameters that lie on two servers


@pytest.mark.parametrize("workers", [1, 3])
def test_a_large_parameter_on_two_servers_is_read_where_they_have_it(workers: int) -> None:
    """Every part of it shows one update of its owner, whichever editions the two are at; and none of it is a copy."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(3, 1 << 18)), nn.Parameter(torch.zeros(5))

        def loss(self) -> Tensor:
            return -(self.weight.sum() + self.bias.sum())

    membership, odd, shown = sized(workers, 2), list[object](), list[bool]()

    def look(model: Large, strategy: Asynchronous) -> None:
        assert strategy._gradients is not None
        flat, layout = model.weight.detach().flatten(), strategy._gradients.layout
        slot = layout.slots[0]
        for rank in membership.owners:
            for bucket, start, stop in owned_by(rank, layout, membership):
                if bucket == slot.bucket:
                    part = flat[max(start, slot.start) - slot.start : min(stop, slot.stop) - slot.start]
                    odd.extend(part.unique().tolist()[1:])
        address, lines = flat.data_ptr(), Path("/proc/self/maps").read_text().splitlines()
        ends = {line: [int(word, 16) for word in line.split()[0].split("-")] for line in lines}
        shown.extend("unisono-mesh" in line for line, (low, high) in ends.items() if low <= address < high)

    def life(number: int) -> None:
        model, comm = Large(), comms[number]
        strategy = Asynchronous(model, torch.optim.SGD(model.parameters(), 1.0), comm)
        comm.reconfigure(placed)
        strategy.configure(placed)
        for _ in range(2):
            strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index, turn in strategy.work(placed.ranges[comm.rank], TURNS):
                look(model, strategy)
                strategy.forward_backward(Microbatch(turn, index, 1 / MICROBATCHES), model.loss)
            strategy.reduce([])
            strategy.step(0.0, float)
        strategy.close()
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 2.0 * TURNS), rtol=1e-4, atol=0.0)

    with network("mesh", 30) as net:
        comms = net.comms(membership.members)
        placed = net.place(membership)
        try:
            in_threads([partial(life, number) for number in membership.members], 60)
        finally:
            for comm in comms.values():
                comm.close()
    assert not odd, "the weights of one owner have seen different updates"
    assert sum(shown) > TURNS
    assert sum(not one for one in shown) <= workers, "only what was there before the first weights is the script's own"
