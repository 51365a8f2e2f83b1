# SPDX-License-Identifier: Apache-2.0
"""Codes both ways between workers that do not wait for each other and servers: what they do not say is only late."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from broken_rounds import LOSSES, SERVERS_LOST, broken_round
from counted_bytes import LAYER, sent_in_a_round
from racing_rounds import MICROBATCHES, TURNS, WEIGHT, Replica, lives, sized
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.codecs import parse_codec
from unisono.core.errors import SetupError
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.clock import Piece
from unisono.parallel.coding import Coding, Outgoing
from unisono.parallel.layout import ParameterInfo, pack
from unisono.parallel.strategy import Microbatch
from unisono.parallel.views import owned_by

pytestmark = pytest.mark.usefixtures("one_thread_each")
FRESH = pytest.mark.parametrize("fresh", ["pull", "push"])
CODECS = ("fp16", "bf16", "int8", "int8:stochastic", "int4", "onebit", "topk:0.01", "randomk:0.1", "clip:1000+int8")
ROWS = 512  # so that each slice is worth a code


# --- nothing is lost


EVERY_CODEC = [(codec, workers, servers, "threads") for codec in CODECS for workers, servers in ((3, 2), (2, 0))]


@FRESH
@pytest.mark.parametrize(("codec", "workers", "servers", "kind"), [*EVERY_CODEC, ("int8", 2, 2, "mesh-tls")])
def test_what_was_pushed_and_what_is_left_to_say_are_all_gradients(
    codec: str, workers: int, servers: int, kind: str, fresh: str
) -> None:
    """Gradients are known, and the learning rate is 1: the weights and the residuals of all workers add up to them."""
    membership, rounds = sized(workers, servers), 2
    compression = parse_codec(codec)

    def life(replica: Replica) -> tuple[Tensor, Tensor]:
        for number in range(rounds):
            replica.round(membership, number)
        return replica.model.weight.detach(), replica.unsaid

    found = lives(membership, life, None, kind, rounds=rounds, rows=ROWS, fresh=fresh, compression=compression)
    for weight, _ in found:
        assert torch.equal(weight, found[0][0]), "at the end of a round all have the same"
    left = torch.stack([left for _, left in found]).sum(0)
    everything = found[0][0] + left
    error = {"bf16": 0.005, "int8:stochastic": 0.01}.get(codec, 0.003)
    torch.testing.assert_close(everything, torch.full_like(everything, WEIGHT), rtol=0.0, atol=error)
    if codec in ("onebit", "topk:0.01", "randomk:0.1"):
        assert float(left.abs().mean()) > 0.1 * WEIGHT, "there is much to feed back"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (2, 2)])
def test_an_owner_knows_bit_for_bit_what_a_worker_computes_on(codec: str, workers: int, servers: int) -> None:
    """Else the difference to it would be the difference to something else. Also after a round, which ends exactly."""
    membership, replicas = sized(workers, servers), dict[int, Replica]()
    differences: list[tuple[Piece, int]] = []
    looked = [0]

    def life(replica: Replica) -> None:
        rank = replica.comm.rank
        replicas[rank] = replica
        begin = replica.strategy._begin_piece

        def look(piece: Piece) -> None:
            gradients = replica.strategy._gradients
            assert gradients is not None
            flat = replica.model.weight.detach().view(-1)
            for owner in membership.owners:
                views = replicas[owner].strategy._views
                assert views is not None
                held = views.held_by(rank)
                for (_, start, stop), view in zip(owned_by(owner, gradients.layout, membership), held, strict=True):
                    looked[0] += 1
                    if not torch.equal(flat[start:stop], view[: flat[start:stop].numel()]):
                        differences.append((piece, owner))
            begin(piece)

        replica.strategy._begin_piece = look  # type: ignore[method-assign]
        for number in range(2):
            replica.round(membership, number)

    lives(membership, life, 1, rounds=2, rows=ROWS, compression=parse_codec(codec), slow=[0])
    assert looked[0] == 2 * TURNS * workers * servers
    assert not differences


def test_residuals_count_by_the_learning_rate_of_the_update_that_they_missed() -> None:
    coding, whole = Coding(parse_codec("topk:0.01")), (0, 0, 4096)
    layout = pack([ParameterInfo("weight", 4000, 4, "float32 cpu")])
    with network("threads") as net:
        outgoing = Outgoing(net.comm(0), coding)
    sent, gradients = torch.zeros(4096), torch.zeros(4096)
    for number in range(60):
        pace = 0.25 if number % 3 else 0.5
        bucket = torch.randn(4096, generator=torch.Generator().manual_seed(number))
        bucket[4000:] = 0.0
        gradients += pace * bucket
        outgoing.begin((number, 0, 1), [bucket], layout, pace)
        code = outgoing.coded(whole, bucket, 0)
        if number % 7:  # else it was not made, and somebody else pushes it again
            sent += pace * coding.decode_gradient(code, torch.empty(4096), 0)
            outgoing.made([whole])
        else:
            gradients -= (
                pace * torch.randn(4096, generator=torch.Generator().manual_seed(number)) * (torch.arange(4096) < 4000)
            )
    left = outgoing._residuals[0].present * outgoing._pace
    torch.testing.assert_close(sent + left, gradients, rtol=1e-4, atol=1e-4)
    assert float(left.norm()) > 0.1 * float(gradients.norm()), "and there is something left"


# --- bytes


@pytest.mark.parametrize(("codec", "times"), [("fp16", 2.0), ("int8", 3.9), ("onebit", 30.0), ("topk:0.01", 90.0)])
def test_codes_travel_both_ways(codec: str, times: float) -> None:
    sent = sent_in_a_round(1, "pull", is_exact=False, compression=parse_codec(codec))
    assert sent[0] <= 3 * TURNS * LAYER / times + 1000
    exact = 9 * LAYER
    assert sent[1] <= exact / times * 1.8, "what one code does not say makes one more of an unchanged slice"


# --- somebody is lost


@FRESH
@pytest.mark.parametrize("codec", ["int8", "topk:0.01"])
@pytest.mark.parametrize("name", ["a worker", "a worker, and another comes", "a worker, and a worker begins to serve"])
def test_with_codes_a_worker_may_be_lost(name: str, codec: str, fresh: str) -> None:
    before, after = LOSSES[name]
    for bound in (1, None):
        options: dict[str, Any] = {"rows": ROWS, "fresh": fresh, "compression": parse_codec(codec)}
        found = broken_round(before, after, lost=1, at=3, bound=bound, **options)
        assert_once(found, codec)


@FRESH
@pytest.mark.parametrize("codec", ["int8", "topk:0.01", "randomk:0.1"])
@pytest.mark.parametrize("name", SERVERS_LOST)
def test_with_codes_and_two_copies_a_server_may_be_lost(name: str, codec: str, fresh: str) -> None:
    """Also what codes have not said is neither lost with it, nor said twice of the piece that only some have seen."""
    before, after = SERVERS_LOST[name]
    left: list[Tensor] = []
    options: dict[str, Any] = {"rows": ROWS, "fresh": fresh, "compression": parse_codec(codec), "left": left}
    found = broken_round(before, after, None, -1, copies=2, half_pushed=3, **options)
    assert_once([weight + torch.stack(left).sum(0) for weight in found], "int8")


def assert_once(found: list[Tensor], codec: str) -> None:
    """Every piece; of a worker that was lost, as far as its codes said it."""
    for weight in found:
        assert torch.equal(weight, found[0])
        if codec == "int8":
            torch.testing.assert_close(weight, torch.full_like(weight, WEIGHT), rtol=0.0, atol=0.003)
        else:
            assert float(weight.max()) <= WEIGHT * 1.01
            assert float(weight.sum()) > 0


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("codec", ["int4", "topk:0.01", "randomk:0.1"])
def test_copies_of_a_slice_are_the_same_with_codes(codec: str, copies: int) -> None:
    membership = sized(3, 3)

    def life(replica: Replica) -> list[tuple[Any, Tensor]]:
        replica.round(membership)
        return [(place, one.weights.clone()) for place, held in replica.strategy._held.items() for one in held]

    found = [entry for some in lives(membership, life, None, "mesh", copies, rows=ROWS,
             compression=parse_codec(codec)) for entry in some]  # fmt: skip
    assert len(found) == 3 * copies
    for place, weights in found:
        for other_place, others in found:
            assert place != other_place or torch.equal(weights, others)


# --- it learns


@FRESH
@pytest.mark.parametrize("codec", ["none", "int8", "int4", "onebit", "topk:0.01"])
def test_with_codes_a_network_learns_about_what_it_learns_without(codec: str, fresh: str) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 4))
    points, targets = torch.randn(256, 20), torch.arange(256) % 4
    points[torch.arange(256), targets] += 2.0
    membership = sized(2, 1)

    def life(number: int) -> float:
        model = nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 4))
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        comm, compression = comms[number], parse_codec(codec)
        strategy = Asynchronous(model, optimizer, comm, fresh=fresh, bound=4, compression=compression)

        def compute(step: int, index: int) -> Tensor:
            here = torch.arange(16) + 64 * (step % 4) + 16 * index
            return nn.functional.cross_entropy(model(points[here]), targets[here])

        comm.reconfigure(membership)
        strategy.configure(membership)
        for round_ in range(8):
            strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index, turn in strategy.work(membership.ranges[comm.rank], 16):
                step = 16 * round_ + turn
                strategy.forward_backward(Microbatch(step, index, WEIGHT), partial(compute, step, index))
            strategy.reduce([])
            strategy.step(0.0, float)
        strategy.close()
        return float(nn.functional.cross_entropy(model(points), targets).detach())

    with network("threads", 15) as net:
        comms = net.comms(membership.members)
        losses = in_threads([partial(life, number) for number in membership.members], 60)
    assert len(set(losses)) == 1
    assert math.isfinite(losses[0])
    assert losses[0] < 0.35, f"{losses[0]:.3f}; it begins at 1.5"


# --- what cannot be


def test_low_rank_factors_are_refused() -> None:
    with pytest.raises(SetupError) as caught:
        Coding(parse_codec("powersgd:2"))
    assert "whole matrices" in caught.value.cause
    assert "topk" in caught.value.do
