# SPDX-License-Identifier: Apache-2.0
"""Embeddings with sparse=True: only touched rows move, and the bits are those of one worker, whoever serves."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from broken_rounds import LOSSES as ROUNDS_LOST
from broken_rounds import SERVERS_LOST, broken_round
from counted_bytes import CountedAll
from racing_rounds import Replica as Racer
from racing_rounds import assert_counted_once, lives, sized
from ranks import in_threads, network
from served_steps import (
    FOR_TABLES,
    MICROBATCHES,
    Setting,
    assert_same,
    batch_of,
    by_all_reduce,
    model_of,
    team,
    trained,
)
from test_server_losses import LOSSES, MOVES, Breaking
from torch import nn

from unisono.core.errors import SetupError, SparseGradient
from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.server import ParameterServer
from unisono.parallel.strategy import Microbatch
from unisono.train.options import Clip

pytestmark = pytest.mark.usefixtures("one_thread_each")

TEAMS = [(1, 0), (3, 0), (1, 2), (2, 1), (4, 3)]  # workers, servers

# --- staleness 0


def settings() -> dict[str, Setting]:
    found = {name: Setting(name, table="sparse") for name in ("plain", "adagrad")}
    found |= {f"{name}, nothing dense": Setting(name, table="alone") for name in FOR_TABLES}
    found["clipped"] = Setting("plain", table="sparse", clip=Clip(norm=0.05, value=0.02))
    found["frozen for a while"] = Setting("adagrad", table="sparse", steps=5, freeze=(1, 3))
    return found


@pytest.mark.parametrize("name", settings())
def test_any_team_comes_to_the_bits_of_all_reduce_by_one_worker(name: str) -> None:
    setting = settings()[name]
    expected = by_all_reduce(setting)
    for workers, servers in TEAMS:
        membership = team(1, range(workers), range(workers, workers + servers))
        kinds = [ParameterServer, partial(ParameterServer, copies=2), *([] if servers else [AllReduce])]
        for kind in kinds:
            for one in trained(setting, [membership], kind):
                assert_same(one, expected)


def test_where_rows_without_a_gradient_would_not_move_anyway_the_bits_are_those_of_dense_training() -> None:
    sparse, dense = (by_all_reduce(Setting("plain", table=kind, steps=6)) for kind in ("sparse", "dense"))
    assert_same(sparse, dense)


@pytest.mark.parametrize("name", FOR_TABLES)
def test_the_update_is_that_of_torch_with_the_sparse_gradient_of_the_whole_batch(name: str) -> None:
    setting = Setting(name, table="alone")
    model = copy.deepcopy(model_of(setting))
    optimizer = FOR_TABLES[name](model.parameters())
    for step in range(setting.steps):
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            inputs, targets = batch_of(step, index)
            (nn.functional.cross_entropy(model(inputs), targets) * (index + 1) / 15).backward()
        optimizer.step()
    for key, value in by_all_reduce(setting)["model"].items():
        torch.testing.assert_close(value, model.state_dict()[key])


@pytest.mark.parametrize("name", MOVES)
def test_slices_of_tables_move_with_their_owners(name: str) -> None:
    setting = Setting("sparse adam", table="alone", steps=6)
    for one in trained(setting, MOVES[name]):
        assert_same(one, by_all_reduce(setting))


@pytest.mark.parametrize("name", ["a server", "one of three servers", "a worker that serves"])
def test_with_two_copies_the_loss_of_an_owner_takes_no_row(name: str) -> None:
    setting = Setting("adagrad", table="sparse", steps=6)
    for one in trained(setting, LOSSES[name], partial(ParameterServer, copies=2)):
        assert_same(one, by_all_reduce(setting))


@pytest.mark.parametrize("applied", [set(), {2}, {3}, {2, 3}, {0, 1}])
def test_an_update_that_only_some_owners_have_made_when_a_peer_is_lost_is_made_once(applied: set[int]) -> None:
    setting = Setting("adagrad", table="sparse", steps=4)
    breaking = Breaking(applied, team(2, [0, 1], [2, 3]))
    for one in trained(setting, [team(1, [0, 1], [2, 3])], each=breaking):
        assert_same(one, by_all_reduce(setting))
    assert breaking.broken == {0, 1, 2, 3}, "it did break"


# --- with staleness


@pytest.mark.parametrize(("workers", "servers", "copies"), [(1, 0, 1), (2, 0, 1), (3, 1, 1), (2, 3, 2)])
@pytest.mark.parametrize("fresh", ["pull", "push"])
@pytest.mark.parametrize("bound", [1, None])
def test_every_row_of_every_piece_counts_once(
    workers: int, servers: int, copies: int, fresh: str, bound: int | None
) -> None:
    membership = sized(workers, servers)

    def life(racer: Racer) -> list[torch.Tensor]:
        for number in range(2):
            racer.round(membership, number)
        whole = racer.strategy.gathered_state()["model"]["table.weight"].t()
        return [racer.model.weight.detach().clone(), whole]

    for weights in lives(membership, life, bound, copies=copies, rounds=2, table=True, fresh=fresh):
        for weight in weights:
            assert_counted_once(weight)


@pytest.mark.parametrize("name", ROUNDS_LOST)
@pytest.mark.parametrize("fresh", ["pull", "push"])
def test_a_round_that_loses_a_worker_is_finished_with_every_row(name: str, fresh: str) -> None:
    before, after = ROUNDS_LOST[name]
    for weight in broken_round(before, after, 1, at=2, table=True, fresh=fresh):
        assert_counted_once(weight)


@pytest.mark.parametrize("name", SERVERS_LOST)
def test_a_round_that_loses_a_server_of_two_is_finished_with_every_row(name: str) -> None:
    before, after = SERVERS_LOST[name]
    for half_pushed in (2, 3):
        for weight in broken_round(before, after, None, at=-1, copies=2, half_pushed=half_pushed, table=True):
            assert_counted_once(weight)


# --- what travels


ROWS, WIDTH, LOOKED_AT = 20_000, 16, 30  # a table of 1.28 MB


def bytes_of_a_step(kind: Any, servers: int, rows: int) -> int:
    """All that is sent in the second step or round of two workers, each of which looks at a few rows."""
    membership, sent = sized(2, servers), list[int]()

    def life(comm: Any) -> None:
        with torch.no_grad():
            model = nn.Embedding(rows, WIDTH, sparse=True, _weight=torch.zeros(rows, WIDTH))
        strategy = kind(model, torch.optim.SGD(model.parameters(), 1.0), comm)
        comm.reconfigure(membership)
        strategy.configure(membership)
        for number in range(2):
            if number:
                comm.gather(torch.zeros(1))
                CountedAll(comm, sent)
            strategy.begin_step([1 / 4] * 4)
            for index, turn in strategy.work(membership.ranges[comm.rank], 1):
                looked = torch.arange(LOOKED_AT) * (rows // LOOKED_AT) + index  # evenly over all owners
                microbatch = Microbatch(turn or 0, index, 1 / 4)
                strategy.forward_backward(microbatch, lambda looked=looked: model(looked).sum())
            strategy.reduce([])
            strategy.step(0.0, float)
        strategy.close()

    with network("threads", 15) as net:
        in_threads([partial(life, comm) for comm in net.comms(membership.members).values()], 40)
    return sum(sent)


@pytest.mark.parametrize("kind", [AllReduce, ParameterServer, Asynchronous])
@pytest.mark.parametrize("servers", [0, 2])
def test_what_travels_follows_from_the_rows_that_were_touched_and_not_from_the_table(kind: Any, servers: int) -> None:
    if kind is AllReduce and servers:
        kind = partial(Asynchronous, fresh="push")
    touched = 4 * LOOKED_AT * (4 + 4 * WIDTH)  # by all microbatches, with their numbers
    for rows in (ROWS // 40, ROWS):
        sent = bytes_of_a_step(kind, servers, rows)
        # There once at most from each worker, and back to each member; when rows are pushed, after every update.
        assert 0.9 * touched < sent < 2 * (2 + servers) * touched < ROWS * WIDTH * 4 / 10


# --- what does not go


def refusal(optimizer: Any, model: nn.Module, kind: Any = ParameterServer) -> SetupError:
    def life(comm: Any) -> None:
        membership = Membership(1, (0,), (range(1),))
        comm.reconfigure(membership)
        strategy = kind(model, optimizer(model.parameters()), comm)
        strategy.configure(membership)
        strategy.begin_step([1.0])
        strategy.forward_backward(Microbatch(0, 0, 1.0), lambda: model(torch.arange(3)).sum())
        strategy.reduce([])

    with network("threads", 15) as net, pytest.raises(SetupError) as caught:
        in_threads([partial(life, comm) for comm in net.comms([0]).values()])
    return caught.value


CANNOT = {
    "Adam": (torch.optim.Adam, "does not support sparse gradients"),
    "momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "keeps sparse tensors"),
    "weight decay": (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), ""),
}


@pytest.mark.parametrize("name", CANNOT)
def test_an_optimizer_that_cannot_have_sparse_gradients_is_refused_before_the_first_step(name: str) -> None:
    optimizer, cause = CANNOT[name]
    error = refusal(optimizer, nn.Embedding(5, 2, sparse=True))
    assert cause in error.cause
    assert "sparse=False" in error.do
    assert "SparseAdam" in error.do


def test_a_table_that_is_an_output_layer_too_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 5, bias=False)
            self.out.weight = self.words.weight

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(numbers))

    error = refusal(partial(torch.optim.SGD, lr=0.1), Tied())
    assert isinstance(error, SparseGradient)
    assert "words.weight" in error.what
    assert "sparse=False" in error.do


def test_rows_that_change_when_they_are_looked_up_are_refused() -> None:
    error = refusal(partial(torch.optim.SGD, lr=0.1), nn.Embedding(5, 2, sparse=True, max_norm=1.0), AllReduce)
    assert "max_norm" in error.what
