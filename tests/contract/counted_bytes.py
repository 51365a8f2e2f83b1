# SPDX-License-Identifier: Apache-2.0
"""A round whose bytes are counted, for tests: who sends how much in questions and answers."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from racing_rounds import MICROBATCHES, TURNS, sized
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.asking import HEADER_BYTES
from unisono.comm.seam import Comm, Message, Pending
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.strategy import Microbatch

WIDTH = 640  # a layer of 1.6 MB that ends with a page: of three, the last has a bucket of its own, the others share one
LAYER = 4 * WIDTH * WIDTH


class Layers(nn.Module):
    """Every step goes through one of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(3))

    def loss(self, step: int) -> Tensor:
        return self.layers[step % 3].sum()


class Counted:
    """A comm that counts what is sent in questions and answers, and by whom."""

    def __init__(self, comm: Comm, sent: dict[int, int]) -> None:
        self._comm, self._sent = comm, sent
        self._exchange, self._lock = comm.exchange, threading.Lock()
        comm.exchange = self.exchange  # type: ignore[method-assign]

    def exchange(self, sends: list[Message], receives: list[Message], tag: int) -> Pending:
        if 1 << 24 <= tag < 1 << 25:
            with self._lock:
                self._sent[self._comm.rank] = self._sent.get(self._comm.rank, 0) + sum(
                    message.tensor.nbytes for message in sends if message.tensor.nbytes != HEADER_BYTES
                )
        return self._exchange(sends, receives, tag)


class CountedAll:
    """A comm that counts all that is exchanged, but for headers of questions and small gathers."""

    def __init__(self, comm: Comm, sent: list[int]) -> None:
        self._sent, self._exchange = sent, comm.exchange
        comm.exchange = self.exchange  # type: ignore[method-assign]

    def exchange(self, sends: list[Message], receives: list[Message], tag: int) -> Pending:
        self._sent.append(sum(message.tensor.nbytes for message in sends if message.tensor.nbytes != HEADER_BYTES))
        return self._exchange(sends, receives, tag)


def sent_in_a_round(servers: int, fresh: str, is_exact: bool = True, **options: Any) -> dict[int, int]:
    """Bytes by rank, in a second round of one worker: in the first, it gets everything."""
    membership, sent = sized(1, servers), dict[int, int]()

    def life(comm: Comm) -> None:
        model = Layers()
        strategy = Asynchronous(model, torch.optim.SGD(model.parameters(), 1.0), comm, fresh=fresh, **options)
        comm.reconfigure(membership)
        strategy.configure(membership)
        for round_ in range(2):
            if round_:
                comm.gather(torch.zeros(1))
                Counted(comm, sent)
            strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index, turn in strategy.work(membership.ranges[comm.rank], TURNS):
                compute = partial(model.loss, turn)
                strategy.forward_backward(Microbatch(turn, index, 1 / MICROBATCHES), compute)
            strategy.reduce([])
            strategy.step(0.0, float)
        strategy.close()
        for layer in model.layers if is_exact else ():
            torch.testing.assert_close(layer.detach(), torch.full_like(layer, -2.0 * TURNS / 3))

    with network("threads", 15) as net:
        in_threads([partial(life, comm) for comm in net.comms(membership.members).values()], 40)
    return sent
