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
    before: int = 0  # generations below this are over for everybody

    def put(self, key: tuple[int, int, int, int], tensor: Tensor) -> None:
        with self.lock:
            self.boxes[key].append(tensor)
            self.lock.notify_all()

    def take(self, key: tuple[int, int, int, int], comm: ThreadComm) -> Tensor:
        generation, sender = key[:2]
        with self.lock:
            arrived = self.lock.wait_for(lambda: self.boxes[key] or comm.over(generation), self.patience_s)
            if comm.over(generation):
                raise _given_up(generation)
            if not arrived:
                raise PeerLost(f"rank {sender} sent nothing for {self.patience_s:g} s")
            return self.boxes[key].popleft()

    def abort(self, before: int) -> None:
        """For everybody on the hub, as if each had been told."""
        with self.lock:
            self.before = max(self.before, before)
            self.lock.notify_all()


def _given_up(generation: int) -> PeerLost:
    return PeerLost(f"generation {generation} was aborted", cause="its members change, or the run ends")


@dataclass
class _Receiving:
    comm: ThreadComm
    waiting: list[tuple[tuple[int, int, int, int], Tensor]]

    def wait(self) -> None:
        for key, target in self.waiting:
            target.copy_(self.comm.hub.take(key, self.comm))
        self.waiting = []


class ThreadComm:
    def __init__(self, hub: Hub, worker: int) -> None:
        self.hub, self.worker = hub, worker
        self.rank, self.size, self.generation = 0, 1, 0
        self._before = 0

    def over(self, generation: int) -> bool:
        return generation < max(self._before, self.hub.before)

    def reconfigure(self, membership: Membership) -> None:
        if self.over(membership.generation):
            raise _given_up(membership.generation)
        self.rank = membership.rank_of(self.worker)
        self.size = len(membership.members)
        self.generation = membership.generation

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        if self.over(self.generation):
            raise _given_up(self.generation)
        for message in sends:
            self.hub.put((self.generation, self.rank, message.peer, tag), message.tensor.clone())
        if not receives:
            return DONE
        return _Receiving(self, [((self.generation, m.peer, self.rank, tag), m.tensor) for m in receives])

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

    def abort(self, before: int) -> None:
        with self.hub.lock:
            self._before = max(self._before, before)
            self.hub.lock.notify_all()

    def close(self) -> None:
        return None
