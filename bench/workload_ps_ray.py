# SPDX-License-Identifier: Apache-2.0
"""A peer: a parameter server in the shape of the example in Ray's documentation.

python bench/workload_ps_ray.py --workers 2 --model mlp --pushes 64 --out DIR        # Ray's environment

An actor holds the weights and applies gradients; workers are actors that get weights and give gradients; this script
passes references to both from one to the other. Synchronous: all workers, then the server. Asynchronous: whoever is
ready. Several servers (the example has one) hold whole tensors each. Arrays travel as numpy's, which Ray does not
pickle. Brings its own local cluster. Started by ps.py; measures nothing itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from workload_ps_model import WORKS, Replica, final_loss, parser_of_options, shares, write_result

AHEAD = 10  # steps that are asked for before the first of them is done
OBJECT_STORE_BYTES = 3 << 30
LEAVE_S = 20.0

Arrays = list[np.ndarray[Any, Any]]


@ray.remote
class ParameterServer:
    def __init__(self, model: str, number: int, servers: int, workers: int) -> None:
        torch.set_num_threads(1)
        work = WORKS[model]
        parameters = list(work.build().parameters())
        self.held = [parameters[index] for index in shares(parameters, servers)[number]]
        self.optimizer = torch.optim.SGD(self.held, lr=work.learning_rate / workers)
        self.pushed = 0
        self.marks: list[tuple[int, float]] = []

    def apply_gradients(self, *gradients: Arrays) -> Arrays:
        for parameter, arrays in zip(self.held, zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.from_numpy(arrays[0] if len(arrays) == 1 else np.add.reduce(arrays))
        self.optimizer.step()
        self.pushed += len(gradients)
        self.marks.append((self.pushed, time.time()))
        return self.get_weights()

    def get_weights(self) -> Arrays:
        return [parameter.detach().numpy() for parameter in self.held]

    def when(self) -> list[tuple[int, float]]:
        return self.marks


@ray.remote
class DataWorker:
    def __init__(self, model: str, servers: int, pushes: int, slower: float) -> None:
        torch.set_num_threads(1)
        self.replica = Replica(WORKS[model], pushes, slower)
        self.held = shares(self.replica.parameters, servers)

    def set_weights(self, weights: tuple[Arrays, ...]) -> None:
        for some, arrays in zip(self.held, weights, strict=True):
            for index, array in zip(some, arrays, strict=True):
                np.copyto(self.replica.parameters[index].detach().numpy(), array)

    def compute_gradients(self, piece: int, *weights: Arrays) -> Any:
        """One list of arrays for each server."""
        self.set_weights(weights)
        arrays = [gradient.numpy() for gradient in self.replica.gradients(piece)]
        parts = [[arrays[index] for index in some] for some in self.held]
        return parts[0] if len(parts) == 1 else parts


def synchronous(servers: list[Any], workers: list[Any], pushes: int) -> None:
    weights = [server.get_weights.remote() for server in servers]
    for step in range(pushes // len(workers)):
        pieces = range(step * len(workers), (step + 1) * len(workers))
        gradients = [asked(worker, piece, weights) for worker, piece in zip(workers, pieces, strict=True)]
        weights = [
            server.apply_gradients.remote(*parts)
            for server, parts in zip(servers, zip(*gradients, strict=True), strict=True)
        ]
        if step % AHEAD == AHEAD - 1:
            ray.wait(weights, num_returns=len(weights), fetch_local=False)


def asynchronous(servers: list[Any], workers: list[Any], pushes: int) -> None:
    weights = [server.get_weights.remote() for server in servers]
    waiting: dict[Any, tuple[Any, list[Any]]] = {}  # by the first of a push's references
    for piece, worker in enumerate(workers):
        gradients = asked(worker, piece, weights)
        waiting[gradients[0]] = worker, gradients
    for piece in range(len(workers), len(workers) + pushes):
        ready, _ = ray.wait(list(waiting), fetch_local=False)
        worker, gradients = waiting.pop(ready[0])
        weights = [server.apply_gradients.remote(part) for server, part in zip(servers, gradients, strict=True)]
        if piece < pushes:
            gradients = asked(worker, piece, weights)
            waiting[gradients[0]] = worker, gradients


def asked(worker: Any, piece: int, weights: list[Any]) -> list[Any]:
    """References to a piece's gradients, one for each server."""
    found = worker.compute_gradients.options(num_returns=len(weights)).remote(piece, *weights)
    return [found] if len(weights) == 1 else found


def train(options: argparse.Namespace) -> None:
    servers = [
        ParameterServer.remote(options.model, number, options.servers, options.workers)
        for number in range(options.servers)
    ]
    workers = [
        DataWorker.remote(
            options.model, options.servers, options.pushes, options.slower if number == options.workers - 1 else 1.0
        )
        for number in range(options.workers)
    ]
    (asynchronous if options.asynchronous else synchronous)(servers, workers, options.pushes)
    parameters: list[Tensor] = list(WORKS[options.model].build().parameters())
    held = shares(parameters, len(servers))
    for some, arrays in zip(held, ray.get([server.get_weights.remote() for server in servers]), strict=True):
        for index, array in zip(some, arrays, strict=True):
            parameters[index] = torch.tensor(array)
    write_result(options.out, ray.get(servers[0].when.remote()), final_loss(WORKS[options.model], parameters))


def family() -> dict[int, int]:
    """The living processes that this one started, and those that they started, with the parent of each."""
    parents = {os.getpid(): 0}
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found = dict.fromkeys(map(int, children.read_text().split()), parent)
                parents |= found
                waiting += found
    del parents[os.getpid()]
    return parents


def unwaited_s(processes: dict[int, int]) -> float:
    """Processor seconds of those whose parent ends first: the system does not count them as this command's."""
    ticks = 0
    for pid, parent in processes.items():
        if parent != os.getpid():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def await_end(processes: Iterable[int]) -> None:
    """Ray's own processes end a while after `shutdown` has returned."""
    deadline_s = time.monotonic() + LEAVE_S
    while any(Path(f"/proc/{pid}/exe").exists() for pid in processes) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def main() -> None:
    options = parser_of_options().parse_args()
    torch.set_num_threads(1)
    # One CPU more than actors: the cores are shared anyway, and nothing waits for a place.
    ray.init(
        num_cpus=options.workers + options.servers + 1,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(options.out.resolve()),
    )
    train(options)
    processes = family()
    (options.out / "unwaited_s").write_text(repr(unwaited_s(processes)))
    ray.shutdown()
    await_end(processes)


if __name__ == "__main__":
    main()
