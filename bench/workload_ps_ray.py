# SPDX-License-Identifier: Apache-2.0
"""A peer: a parameter server the way the example in Ray's documentation has it; and one that we have tuned.

python bench/workload_ps_ray.py --workers 2 --model mlp --pushes 64 --out DIR        # Ray's environment

An actor holds the weights and applies gradients; workers are actors that get weights and give gradients; this script
passes references to both from one to the other. Synchronous: all workers, then the server. Asynchronous: whoever is
ready. Gradients travel as numpy's arrays, are stacked and summed; weights as a dictionary of tensors, as `state_dict`
has them. ``--tuned``: nothing is stacked, and weights are numpy's too, which Ray does not pickle. Several servers (the
example has one) hold whole tensors each. Brings its own local cluster. Started by ps.py; measures nothing itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable, Sequence
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
Weights = dict[str, Tensor] | Arrays


@ray.remote
class ParameterServer:
    def __init__(self, model: str, number: int, servers: int, workers: int, tuned: bool) -> None:
        torch.set_num_threads(1)
        self.work, self.tuned = WORKS[model], tuned
        self.model = self.work.build()
        parameters = list(self.model.named_parameters())
        some = shares([parameter for _, parameter in parameters], servers)[number]
        self.held = dict(parameters[index] for index in some)
        self.optimizer = torch.optim.SGD(self.held.values(), lr=self.work.learning_rate / workers)
        self.pushed = 0
        self.marks: list[tuple[int, float]] = []

    def apply_gradients(self, *gradients: Arrays) -> Weights:
        summed = [self.sum_of(arrays) for arrays in zip(*gradients, strict=True)]
        self.optimizer.zero_grad()
        for parameter, array in zip(self.held.values(), summed, strict=True):
            parameter.grad = torch.from_numpy(array)
        self.optimizer.step()
        self.pushed += len(gradients)
        self.marks.append((self.pushed, time.time()))
        return self.get_weights()

    def sum_of(self, arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        if not self.tuned:
            return np.stack(arrays).sum(axis=0)
        return arrays[0] if len(arrays) == 1 else np.add.reduce(arrays)

    def get_weights(self) -> Weights:
        if self.tuned:
            return [parameter.detach().numpy() for parameter in self.held.values()]
        return {name: value.cpu() for name, value in self.model.state_dict().items() if name in self.held}

    def when(self) -> list[tuple[int, float]]:
        return self.marks


@ray.remote
class DataWorker:
    def __init__(self, model: str, servers: int, pushes: int, slower: float) -> None:
        torch.set_num_threads(1)
        self.replica = Replica(WORKS[model], pushes, slower)
        self.held = shares(self.replica.parameters, servers)

    def set_weights(self, weights: Sequence[Weights]) -> None:
        tensors: dict[str, Tensor] = {}
        for some, part in zip(self.held, weights, strict=True):
            if isinstance(part, dict):
                tensors |= part
                continue
            for index, array in zip(some, part, strict=True):
                np.copyto(self.replica.parameters[index].detach().numpy(), array)
        if tensors:
            self.replica.model.load_state_dict(tensors)

    def compute_gradients(self, piece: int, *weights: Weights) -> Any:
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
        ParameterServer.remote(options.model, number, options.servers, options.workers, options.tuned)
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
    for some, part in zip(held, ray.get([server.get_weights.remote() for server in servers]), strict=True):
        for index, value in zip(some, part.values() if isinstance(part, dict) else part, strict=True):
            parameters[index] = torch.as_tensor(value).clone()
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
    parser = parser_of_options()
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args()
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
