# SPDX-License-Identifier: Apache-2.0
"""A peer: a parameter server the way PyTorch's tutorial on batched RPC has it, on TensorPipe; and a tuned one.

torchrun --standalone --nproc-per-node 3 bench/workload_ps_rpc.py --workers 2 --model mlp --pushes 64 --out DIR

A trainer pushes its gradients by calling a method of the server and gets the model as the answer. The method adds to
gradients that are kept, under a lock; the push that completes an update divides them, runs the optimizer, clears them
and answers all who wait. ``--tuned``: the first gradient of an update is taken as it came, nothing is divided or
cleared, and weights travel without a module around them. Asynchronous: every push completes an update. Several servers
(the tutorial has one) hold whole tensors each. Rank 0 is the first server and starts the trainers. Started by ps.py;
measures nothing itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from workload_ps_model import WORKS, Replica, final_loss, parser_of_options, shares, write_result

PATIENCE_S = 3600  # one call is a trainer's whole work; ps.py has the hard limit

Answer = tuple[Iterable[Tensor], int]  # weights, and the piece to go on with (synchronous: the first of the step)


class ParameterServer:
    """As in the tutorial."""

    def __init__(self, model: str, number: int, servers: int, workers: int, asynchronous: bool) -> None:
        work = WORKS[model]
        parameters = list(work.build().parameters())
        self.held = nn.ParameterList([parameters[index] for index in shares(parameters, servers)[number]])
        self.completes = 1 if asynchronous else workers
        self.optimizer = torch.optim.SGD(self.held.parameters(), lr=self.rate(work.learning_rate, workers))
        self.lock = threading.Lock()
        self.waiting: torch.futures.Future[Answer] = torch.futures.Future()
        self.pushed, self.handed_out = 0, workers
        self.marks: list[tuple[int, float]] = []
        self.clear()

    def rate(self, learning_rate: float, workers: int) -> float:
        """Of a gradient that is divided by the pushes of an update."""
        return learning_rate * self.completes / workers

    def clear(self) -> None:
        for parameter in self.held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.zero_grad(set_to_none=False)

    def add(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.held, gradients, strict=True):
            parameter.grad += gradient

    def update(self) -> None:
        for parameter in self.held:
            parameter.grad /= self.completes
        self.optimizer.step()
        self.clear()

    def weights(self) -> Iterable[Tensor]:
        """The module itself."""
        return self.held

    @staticmethod
    def fetch(server: rpc.RRef[ParameterServer]) -> Iterable[Tensor]:
        self: ParameterServer = server.local_value()
        return self.weights()

    @staticmethod
    def when(server: rpc.RRef[ParameterServer]) -> list[tuple[int, float]]:
        self: ParameterServer = server.local_value()
        return self.marks

    @staticmethod
    @rpc.functions.async_execution
    def push_and_fetch(server: rpc.RRef[ParameterServer], gradients: Sequence[Tensor]) -> torch.futures.Future[Answer]:
        self: ParameterServer = server.local_value()
        with self.lock:
            self.add(gradients)
            self.pushed += 1
            answer = self.waiting
            if self.pushed % self.completes == 0:
                self.update()
                self.marks.append((self.pushed, time.time()))
                self.waiting = torch.futures.Future()
                answer.set_result((self.weights(), self.handed_out))
                self.handed_out += self.completes
        return answer


class Tuned(ParameterServer):
    """With fewer passes over gradients."""

    def rate(self, learning_rate: float, workers: int) -> float:
        """Of a gradient that is not divided."""
        return learning_rate / workers

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def add(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.held, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient  # it has just come out of the message: nobody else has it
            else:
                parameter.grad += gradient

    def update(self) -> None:
        self.optimizer.step()
        self.clear()

    def weights(self) -> Iterable[Tensor]:
        return [parameter.detach() for parameter in self.held]


def train(
    servers: Sequence[rpc.RRef[ParameterServer]],
    number: int,
    model: str,
    pushes: int,
    asynchronous: bool,
    slower: float,
) -> None:
    """On a trainer, called by rank 0: until no piece is left."""
    replica = Replica(WORKS[model], pushes, slower)
    held = shares(replica.parameters, len(servers))

    def take(number: int, weights: Iterable[Tensor]) -> None:
        for index, value in zip(held[number], weights, strict=True):
            replica.parameters[index].data = value.detach()

    for which, server in enumerate(servers):
        take(which, rpc.rpc_sync(server.owner(), ParameterServer.fetch, args=(server,)))
    piece = number
    while piece < pushes:
        gradients = replica.gradients(piece)
        asked = [
            rpc.rpc_async(
                server.owner(), ParameterServer.push_and_fetch, args=(server, [gradients[index] for index in some])
            )
            for server, some in zip(servers, held, strict=True)
        ]
        for which, answer in enumerate(asked):
            weights, following = answer.wait()
            take(which, weights)
            if which == 0:
                piece = following if asynchronous else following + number


def main() -> None:
    parser = parser_of_options()
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), options.servers + options.workers
    backend = rpc.TensorPipeRpcBackendOptions(rpc_timeout=PATIENCE_S)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=backend)
    if rank == 0:
        servers = [
            rpc.remote(
                f"rank{number}",
                Tuned if options.tuned else ParameterServer,
                args=(options.model, number, options.servers, options.workers, options.asynchronous),
            )
            for number in range(options.servers)
        ]
        trainers = []
        for number in range(options.workers):
            slower = options.slower if number == options.workers - 1 else 1.0
            about = (servers, number, options.model, options.pushes, options.asynchronous, slower)
            trainers.append(rpc.rpc_async(f"rank{options.servers + number}", train, args=about))
        torch.futures.wait_all(trainers)
        report(options.model, servers, options.out)
    rpc.shutdown()


def report(model: str, servers: Sequence[rpc.RRef[ParameterServer]], out: Path) -> None:
    parameters: list[Tensor] = list(WORKS[model].build().parameters())
    for server, some in zip(servers, shares(parameters, len(servers)), strict=True):
        fetched = rpc.rpc_sync(server.owner(), ParameterServer.fetch, args=(server,))
        for index, value in zip(some, fetched, strict=True):
            parameters[index] = value.detach()
    marks = rpc.rpc_sync(servers[0].owner(), ParameterServer.when, args=(servers[0],))
    write_result(out, marks, final_loss(WORKS[model], parameters))


if __name__ == "__main__":
    main()
