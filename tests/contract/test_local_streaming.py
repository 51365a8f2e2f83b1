# SPDX-License-Identifier: Apache-2.0
"""Local steps in fragments: what the paper's algorithm does with R copies of a model, on any number of workers."""

from __future__ import annotations

import threading

import pytest
import torch
from local_rounds import OPTIMIZERS, REPLICAS, Rounds, assert_same_bits, by_hand_in_fragments, by_unisono
from ranks import together
from torch import Tensor, nn

from models import CASES
from unisono.comm.faulty import FaultyComm
from unisono.comm.seam import Comm
from unisono.core.errors import SetupError
from unisono.core.membership import even
from unisono.parallel.local import LocalSteps
from unisono.parallel.strategy import Microbatch
from unisono.parallel.streaming import Streaming, fragments_of

LOCALS = {
    "two": LocalSteps(h=4, outer="nesterov", fragments=2),
    "three, uneven": LocalSteps(h=4, fragments=3, alpha=0.25),
    "all of it the others'": LocalSteps(h=4, outer="nesterov", fragments=4, alpha=0.0),
}


@pytest.mark.parametrize(
    ("sizes", "fragments", "expected"),
    [
        ([5, 5, 5, 5], 2, [0, 0, 1, 1]),
        ([100, 1, 1, 1], 2, [0, 1, 1, 1]),
        ([1, 1, 1, 100], 2, [0, 0, 0, 1]),
        ([100, 1, 1, 1], 4, [0, 1, 2, 3]),
        ([1, 1, 1, 100], 4, [0, 1, 2, 3]),
        ([3], 1, [0]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 0, 0, 1, 1, 2]),
    ],
)
def test_fragments_are_neighbours_of_about_the_same_size_and_none_is_empty(
    sizes: list[int], fragments: int, expected: list[int]
) -> None:
    assert fragments_of(sizes, fragments) == expected


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fragments_go_their_way_as_the_paper_has_it(local: str, optimizer: str) -> None:
    case = CASES["mlp"]()
    torch.manual_seed(0)
    plain = case.model().double()
    rounds = Rounds(case, 4, 4, 17, torch.float64, short=30)
    ours, _ = by_unisono(plain, OPTIMIZERS[optimizer], rounds, LOCALS[local])
    expected = by_hand_in_fragments(plain, OPTIMIZERS[optimizer], rounds, LOCALS[local])
    for (name, mine), other in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert not torch.equal(mine, dict(plain.named_parameters())[name]), f"{name} has not moved"
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_bits_are_the_same_on_any_number_of_workers(local: str, model: str) -> None:
    case = CASES[model]()
    torch.manual_seed(0)
    assert case.dropout_free is not None  # ranks are threads here, and share one random generator
    plain = case.dropout_free()
    rounds = Rounds(case, 3, 4, 13, torch.float32, short=0 if model == "cnn" else 24)
    alone, losses = by_unisono(plain, case.optimizer, rounds, LOCALS[local])
    for workers, kind in ((2, "threads"), (3, "mesh"), (4, "threads")):
        ours, others = by_unisono(plain, case.optimizer, rounds, LOCALS[local], workers, kind)
        assert others == losses
        assert_same_bits(ours, alone)


class SlowRound:
    """A worker's round of two local steps, whose first exchange takes until the second local step is being computed."""

    patience_s = 5.0  # if that never happens

    def __init__(self, comm: Comm) -> None:
        self.order: list[str] = []
        self._on_its_way, self._went_on = threading.Event(), threading.Event()
        self._model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        sgd, local = torch.optim.SGD(self._model.parameters(), lr=0.1), LocalSteps(h=2, fragments=2)
        self._strategy = Streaming(self._model, sgd, FaultyComm(comm, self._exchanging), local=local)

    def _exchanging(self) -> None:
        if self.order and not self._on_its_way.is_set():
            self.order.append("the first fragment leaves")
            self._on_its_way.set()
            self._went_on.wait(self.patience_s)
            self.order.append("the first fragment has come")

    def _first(self) -> Tensor:
        self.order.append("the first local step")
        return self._loss()

    def _second(self) -> Tensor:
        if not self._went_on.is_set():
            self._on_its_way.wait(self.patience_s)
            self.order.append("the second local step")
            self._went_on.set()
        return self._loss()

    def _loss(self) -> Tensor:
        return self._model(torch.ones(2, 3)).square().sum()

    def run(self, rank: int) -> list[str]:
        members = even(1, (0, 1), REPLICAS)
        try:
            self._strategy.configure(members)
            self._strategy.begin_step([1 / REPLICAS] * REPLICAS)
            for replica in members.ranges[rank]:
                self._strategy.forward_backward(
                    Microbatch(0, replica, 1 / REPLICAS, (0.5, 0.5)), self._first, self._second
                )
            self._strategy.step(self._strategy.reduce([]).loss, lambda: 0.0)
        finally:
            self._strategy.close()
        return self.order


def test_the_next_local_step_is_computed_while_a_fragment_is_on_its_way() -> None:
    members = even(1, (0, 1), REPLICAS)
    for order in together("threads", 2, lambda comm: SlowRound(comm).run(comm.rank), membership=members):
        assert order == [
            *["the first local step"] * 2,  # of both replicas
            "the first fragment leaves",
            "the second local step",
            "the first fragment has come",
        ]


def test_what_fragments_cannot_do_is_refused() -> None:
    def work(comm: Comm) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SetupError, match="inner_state='reset' cannot take effect with fragments"):
            Streaming(model, optimizer, comm, local=LocalSteps(h=4, fragments=2, inner_state="reset"))

    together("threads", 1, work)
    with pytest.raises(SetupError, match="2 trained tensors cannot be cut into 3 fragments"):
        fragments_of([4, 4], 3)
