# SPDX-License-Identifier: Apache-2.0
"""Parameter servers at staleness 0 with compressed gradients: the bits of a compressed all-reduce, whoever serves.

Weights, optimizer state and what the codec keeps; also when owners come and go, when one is lost, and when a generation
breaks in the middle of an update. And that fewer bytes are sent, counted where they leave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import together
from served_steps import MICROBATCHES, Replica, Setting, assert_same, team, trained
from test_server_losses import Breaking, survivors
from torch import Tensor, nn

from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory
from unisono.comm.reducers import compressing
from unisono.comm.reducers.owned import OwnedReducer, shared_out
from unisono.comm.seam import Comm, Message, Pending
from unisono.core.membership import Membership
from unisono.core.spec import JobSpec
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.server import ParameterServer
from unisono.train.adding import Adding
from unisono.train.options import Clip

KEEPING = ("int4", "onebit", "topk:0.05", "randomk:0.1", "powersgd:2", "int8,feedback")
CODECS = ("fp16", "bf16", "int8", "int8:stochastic", "clip:0.1+int8", "clip:0.1", "topk:0.05,nofeedback", *KEEPING)
WIDE = Setting("adamw", width=60, steps=4)
Kind = Callable[..., AllReduce]


def adding_of(codec: str, model: nn.Module) -> Adding:
    spec = JobSpec(microbatches=MICROBATCHES, batch_size=MICROBATCHES, seed=7, threads=1, compress=codec)
    return Adding("direct", spec, model, torch.device("cpu"), lambda _: None)


def all_reducing(codec: str) -> Kind:
    def kind(model: nn.Module, *rest: Any) -> AllReduce:
        adding = adding_of(codec, model)
        strategy = AllReduce(model, *rest, make_reducer=adding, carry=adding.carry)
        adding.carried, adding.shapes_of = strategy.carried, strategy.shapes
        return strategy

    return kind


def serving(codec: str, copies: int = 1) -> Kind:
    def kind(model: nn.Module, *rest: Any) -> ParameterServer:
        adding = adding_of(codec, model)
        strategy = ParameterServer(model, *rest, copies=copies, push=adding.push, carry=adding.carry)
        adding.carried, adding.shapes_of = strategy.carried, strategy.shapes
        return strategy

    return kind


class Keeping:
    """Steps, and notes what the codec keeps for each microbatch at the end."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Tensor]] = {}

    def __call__(self, replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        for microbatch, state in replica.strategy.carried.mine.items():
            self.kept[microbatch] = {name: tensor.clone() for name, tensor in state.items()}


@functools.cache
def by_all_reduce(codec: str, setting: Setting = WIDE) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
    keeping = Keeping()
    (found,) = trained(setting, [team(1, [0])], all_reducing(codec), each=keeping)
    return found, keeping.kept


def check(
    codec: str, teams: Sequence[Membership], copies: int = 1, setting: Setting = WIDE, kind: str = "threads"
) -> None:
    expected, kept = by_all_reduce(codec, setting)
    keeping = Keeping()
    found = trained(setting, teams, serving(codec, copies), kind, each=keeping)
    assert len(found) == len(teams[-1].members)
    for one in found:
        assert_same(one, expected)
    assert keeping.kept.keys() == kept.keys()
    for microbatch, state in kept.items():
        assert state.keys() == keeping.kept[microbatch].keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, keeping.kept[microbatch][name]), f"{name} of microbatch {microbatch}"


# --- the same bits


@pytest.mark.parametrize("codec", CODECS)
def test_any_team_comes_to_the_bits_of_a_compressed_all_reduce(codec: str) -> None:
    for workers, servers in [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 2), (3, 0), (3, 2), (4, 0), (4, 1), (4, 3)]:
        check(codec, [team(1, range(workers), range(workers, workers + servers))])


def test_the_codecs_do_change_the_bits() -> None:
    """Or the tests above would say nothing."""
    (plain,) = trained(WIDE, [team(1, [0])], AllReduce)
    for codec in CODECS:
        weights = by_all_reduce(codec)[0]["model"]["first.weight"]
        assert not torch.equal(weights, plain["model"]["first.weight"]), codec
        assert any(by_all_reduce(codec)[1].values()) == (codec in KEEPING), codec


@pytest.mark.parametrize("codec", ["int8", "onebit", "randomk:0.1", "powersgd:2"])
@pytest.mark.parametrize("setting", [
    Setting("momentum", width=60, clip=Clip(norm=0.1)),
    Setting("sgd", width=60, l1=0.01),
    Setting("adamw", width=301, steps=3, channels_last=True),
], ids=["clipped", "L1", "channels last"])  # fmt: skip
def test_whatever_is_asked_for_comes_to_the_bits_of_a_compressed_all_reduce(codec: str, setting: Setting) -> None:
    for workers, servers, copies in ((2, 0, 1), (2, 0, 2), (2, 3, 2), (3, 2, 1)):
        check(codec, [team(1, range(workers), range(workers, workers + servers))], copies, setting)


def test_layers_that_freeze_change_the_slices_where_a_codec_keeps_nothing() -> None:
    setting = Setting("momentum", width=60, steps=5, freeze=(1, 3))
    for workers, servers in ((2, 0), (2, 2)):
        check("int8:stochastic", [team(1, range(workers), range(workers, workers + servers))], 1, setting)


@pytest.mark.parametrize("codec", ["int8", "topk:0.05", "powersgd:2"])
def test_over_shared_memory_and_between_machines_it_is_the_same(codec: str) -> None:
    for kind in ("mesh", "mesh-tls"):
        check(codec, [team(1, [0, 1], [2, 3])], copies=2, kind=kind)
    check(codec, [team(1, [0, 1, 2])], kind="mesh")


# --- owners and workers come and go


MOVES = {
    "a second server comes": [team(1, [0, 1], [2]), team(2, [0, 1], [2, 3])],
    "a worker comes": [team(1, [0], [1, 2]), team(2, [0, 3], [1, 2])],
    "workers serve before servers come": [team(1, [0, 1]), team(2, [0, 1], [2])],
    "a worker begins to serve": [team(1, [0, 1, 2], [3]), team(2, [0, 1], [2, 3])],
    "places change": [team(1, [0, 1], [2, 3]), team(2, [2, 0], [3, 1]), team(3, [3, 1, 0, 2])],
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("codec", ["int8", "onebit", "powersgd:2"])
def test_what_the_codec_keeps_moves_with_the_microbatches_when_members_come_and_change_places(
    name: str, codec: str
) -> None:
    check(codec, MOVES[name], setting=Setting("adamw", width=60, steps=6))


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk:0.05", "powersgd:2"])
def test_with_two_copies_the_loss_of_a_server_takes_nothing_of_what_the_codec_keeps(codec: str) -> None:
    setting = Setting("adamw", width=60, steps=6)
    check(codec, [team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 4]), team(3, [0, 1], [4])], 2, setting)
    check(codec, [team(1, [0, 1], [2, 3]), team(2, [0, 1], [2, 4])], 2, setting)


# --- a generation that breaks in the middle of an update


@pytest.mark.parametrize("applied", [(), (2,), (2, 3), (2, 3, 4), (0, 1)])
@pytest.mark.parametrize("codec", ["int8", "onebit", "powersgd:2"])
def test_a_step_that_only_some_owners_have_made_when_a_peer_is_lost_is_made_once(
    applied: tuple[int, ...], codec: str
) -> None:
    before, after = team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 3, 4])
    for copies in (1, 2):
        breaking = Breaking(set(applied), after)
        found = trained(WIDE, [before], serving(codec, copies), each=breaking)
        assert breaking.broken == {0, 1, 2, 3, 4}, "it did break"
        for one in found:
            assert_same(one, by_all_reduce(codec)[0])


@pytest.mark.parametrize("applied", [(3,), (2,), ()])
@pytest.mark.parametrize("lost", [2, 3])
def test_with_two_copies_the_server_that_broke_it_may_be_gone(applied: tuple[int, ...], lost: int) -> None:
    before, after = team(1, [0, 1], [2, 3]), team(2, [0, 1], [5 - lost])
    breaking = Breaking(set(applied), after)
    found = survivors(WIDE, before, after, breaking, lost, serving("onebit", 2))
    assert len(found) == 3
    for one in found:
        assert_same(one, by_all_reduce("onebit")[0])


# --- the reducer by itself


class Counting:
    """Counts the bytes that leave a rank in exchanges; everything else is the comm's."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.sent, self.received = comm, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        self.sent += sum(message.tensor.numel() * message.tensor.element_size() for message in sends)
        self.received += sum(message.tensor.numel() * message.tensor.element_size() for message in receives)
        return self._comm.exchange(sends, receives, tag)


def pushed(codec: str, workers: int, servers: int, elements: int, copies: int = 1) -> list[tuple[int, int]]:
    """Bytes (out, in) of every rank, for one push of one vector."""
    membership = team(1, range(workers), range(workers, workers + servers))
    compression = parse_codec(codec)

    def work(comm: Comm) -> tuple[int, int]:
        counting: Any = Counting(comm)
        carried = Memory(compressing.fresh(compression, [elements], MICROBATCHES, lambda _: [], torch.device("cpu")))
        owned = OwnedReducer(counting, membership, copies=copies)
        reducer = compressing.make(compression, counting, membership, 3, carried, owned=owned)
        reducer.begin(1)
        seeded = torch.Generator().manual_seed(comm.rank)
        reducer.reduce([torch.randn(elements, generator=seeded) for _ in range(reducer.parts)], 0)
        return counting.sent, counting.received

    return together("threads", workers + servers, work, membership=membership)


def test_fewer_bytes_are_pushed_and_fewer_arrive_at_the_servers() -> None:
    elements, vector = 100_000, 400_000
    plain = pushed("none", 4, 2, elements)
    assert sum(out for out, _ in plain) >= 4 * vector
    for codec, times in (("fp16", 2.0), ("int8", 3.9), ("onebit", 31.0), ("topk:0.01", 100.0)):
        found = pushed(codec, 4, 2, elements)
        leaving, arriving = (sum(pair[i] for pair in found) for i in (0, 1))
        assert leaving == arriving
        # Five microbatches: one worker sends two codes. All to all but itself, and the sum to the servers.
        expected = (MICROBATCHES * 3 / 4 + 1) * vector / times
        assert leaving == pytest.approx(expected, rel=0.06), codec
        at_servers = sum(received for _, received in found[4:])
        assert at_servers == pytest.approx(vector / times, rel=0.06), codec
        assert sum(out for out, _ in found[4:]) == 0, "servers push nothing"


def test_a_further_copy_costs_one_more_code_of_the_sum_and_not_everybodys() -> None:
    once, twice = (sum(out for out, _ in pushed("int8", 4, 2, 100_000, copies)) for copies in (1, 2))
    assert twice - once == pytest.approx(400_000 / 3.9, rel=0.06)


@pytest.mark.parametrize("codec", ["int8", "topk:0.001", "randomk:0.1"])
@pytest.mark.parametrize("elements", [1024, 1025, 2047, 5000, 70_001])
def test_owners_whose_slices_end_inside_a_block_have_the_sum_of_all_of_it(codec: str, elements: int) -> None:
    compression = parse_codec(codec)

    def work(servers: int, comm: Comm) -> list[tuple[slice, Tensor]]:
        membership = team(1, [0, 1, 2], range(3, 3 + servers))
        carried = Memory(compressing.fresh(compression, [elements], MICROBATCHES, lambda _: [], torch.device("cpu")))
        owned = OwnedReducer(comm, membership, copies=2) if servers else None
        reducer = compressing.make(compression, comm, membership, 3, carried, owned=owned)
        reducer.begin(9)
        mine = membership.ranges[comm.rank]
        seeds = [torch.Generator().manual_seed(microbatch) for microbatch in mine] or [torch.Generator()]
        parts = [torch.randn(elements, generator=seeded) for seeded in seeds]
        reducer.reduce(parts, 0)
        if not servers:
            return [(slice(0, elements), parts[0])]
        places = [shared_out(elements, membership, copy)[comm.rank] for copy in range(2)]
        return [(place, parts[0][place]) for place in places]

    ((_, expected),) = together("threads", 3, partial(work, 0), membership=team(1, [0, 1, 2]))[0]
    for servers in (1, 2, 3):
        found = together(
            "threads", 3 + servers, partial(work, servers), membership=team(1, [0, 1, 2], range(3, 3 + servers))
        )
        covered = torch.zeros(elements, dtype=torch.int64)
        for pieces in found:
            for place, values in pieces:
                assert torch.equal(values, expected[place]), place
                covered[place] += 1
        assert int(covered.min()) >= 1
