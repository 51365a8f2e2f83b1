# SPDX-License-Identifier: Apache-2.0
"""Inside one replica: how its ranks agree with each other, and follow the first of them.

A replica is a worker, or several ranks that hold one model between them and go through the same code. Whatever one of
them learns from other replicas (a lost peer, a wish to stop) all must learn at the same place, or they would part ways
inside of a collective. So: the first rank asks and the others hear the answer (`from_first`, `LedComm`), or each says
how it went and all go by the worst (`agree`). `ALONE` is the replica of one rank. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.seam import DONE, Comm, Message, Op, Pending
from unisono.core.errors import InternalError, PeerLost
from unisono.core.membership import Membership

_FOR_EVER = timedelta(days=365)  # who hangs or dies is found out by others, who then end this process


class Inner(Protocol):
    rank: int
    size: int

    def agree(self, ok: bool) -> bool:
        """Whether it is so for all ranks."""

    def from_first(self, ask: Callable[[], Any]) -> Any:
        """What the first rank's `ask` returns; only there is it called. Anything that JSON can hold."""

    def rows(self, numbers: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers, by rank."""


class Alone:
    """One rank."""

    rank, size = 0, 1

    def agree(self, ok: bool) -> bool:
        return ok

    def from_first(self, ask: Callable[[], Any]) -> Any:
        return ask()

    def rows(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(map(float, numbers))]


ALONE = Alone()


class World:
    """The ranks of torch's default world, which is one replica. Talks beside what the model's own collectives say."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def agree(self, ok: bool) -> bool:
        box = torch.tensor([int(ok)])
        dist.all_reduce(box, dist.ReduceOp.MIN, group=self._group)
        return bool(box.item())

    def from_first(self, ask: Callable[[], Any]) -> Any:
        data = json.dumps(ask()).encode() if self.rank == 0 else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self._group)
        box = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(box, 0, group=self._group)
        return json.loads(bytes(box.numpy()))

    def rows(self, numbers: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(list(numbers), dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return [row.tolist() for row in found]

    def spread(self, tensor: Tensor) -> None:
        """The first rank's values, into everybody's."""
        dist.broadcast(tensor, 0, group=self._group)


def agreed(lost: PeerLost) -> PeerLost:
    """All ranks of the replica know of it."""
    lost.agreed = True
    return lost


class LedComm:
    """For what a replica says to others with one voice: the first rank says and hears it, the rest hear it from that
    one. Tensors of gradients and of state do not go this way: each rank sends those to its like."""

    def __init__(self, comm: Comm, world: World) -> None:
        self._comm, self._world = comm, world

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    @property
    def generation(self) -> int:
        return self._comm.generation

    def reconfigure(self, membership: Membership) -> None:
        self._comm.reconfigure(membership)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        raise InternalError(f"{len(sends)} tensors to send and {len(receives)} to receive (tag {tag}) with one voice")

    def gather(self, tensor: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        self._led(lambda: [row.copy_(found) for row, found in zip(rows, self._comm.gather(tensor), strict=True)], rows)
        return rows

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._led(lambda: self._comm.broadcast(tensor, root), [tensor])

    def reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        self._led(lambda: self._comm.reduce(tensor, op).wait(), [tensor])
        return DONE

    def _led(self, talk: Callable[[], Any], filled: Sequence[Tensor]) -> None:
        lost: PeerLost | None = None
        if self._world.rank == 0:
            try:
                talk()
            except PeerLost as error:
                lost = error
        if not self._world.agree(lost is None):
            raise agreed(lost or PeerLost("another rank of this replica has lost a peer"))
        for tensor in filled:
            self._world.spread(tensor)

    def abort(self, before: int) -> None:
        self._comm.abort(before)

    def close(self) -> None:
        self._comm.close()
