# SPDX-License-Identifier: Apache-2.0
"""Comm between threads of one process: for a run of one worker, and for fast tests of many.

A `Hub` is the network; each thread holds one `ThreadComm`. Sent tensors are copied at once, as a network would.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.comm.seam import DONE, Message, Op, Pending
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership

_GATHER_TAG = -1  # negative tags are the hub's own


@dataclass
class Hub:
    """Mailboxes by (generation, sender, receiver, tag), in the order sent."""

    patience_s: float = 60.0
    lock: threading.Condition = field(default_factory=threading.Condition)
    boxes: dict[tuple[int, int, int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    aborted: set[int] = field(default_factory=set)  # generations

    def put(self, key: tuple[int, int, int, int], tensor: Tensor) -> None:
        with self.lock:
            self.boxes[key].append(tensor)
            self.lock.notify_all()

    def take(self, key: tuple[int, int, int, int]) -> Tensor:
        generation, sender = key[:2]
        with self.lock:
            arrived = self.lock.wait_for(lambda: self.boxes[key] or generation in self.aborted, self.patience_s)
            if generation in self.aborted:
                raise PeerLost(f"generation {generation} was aborted while waiting for rank {sender}")
            if not arrived:
                raise PeerLost(f"rank {sender} sent nothing for {self.patience_s:g} s")
            return self.boxes[key].popleft()

    def abort(self, generation: int) -> None:
        with self.lock:
            self.aborted.add(generation)
            self.lock.notify_all()


@dataclass
class _Receiving:
    hub: Hub
    waiting: list[tuple[tuple[int, int, int, int], Tensor]]

    def wait(self) -> None:
        for key, target in self.waiting:
            target.copy_(self.hub.take(key))
        self.waiting = []


class ThreadComm:
    def __init__(self, hub: Hub, worker: int) -> None:
        self.hub, self.worker = hub, worker
        self.rank, self.size, self.generation = 0, 1, 0

    def reconfigure(self, membership: Membership) -> None:
        self.rank = membership.rank_of(self.worker)
        self.size = len(membership.members)
        self.generation = membership.generation

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        for message in sends:
            self.hub.put((self.generation, self.rank, message.peer, tag), message.tensor.clone())
        if not receives:
            return DONE
        return _Receiving(self.hub, [((self.generation, m.peer, self.rank, tag), m.tensor) for m in receives])

    def gather(self, tensor: Tensor) -> list[Tensor]:
        result = [torch.empty_like(tensor) for _ in range(self.size)]
        result[self.rank].copy_(tensor)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [Message(rank, tensor) for rank in others]
        self.exchange(sends, [Message(rank, result[rank]) for rank in others], _GATHER_TAG).wait()
        return result

    def broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self.gather(tensor)[root])

    def reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        stacked = torch.stack(self.gather(tensor))
        tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        return DONE

    def abort(self) -> None:
        self.hub.abort(self.generation)

    def close(self) -> None:
        return None
