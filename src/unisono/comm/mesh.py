# SPDX-License-Identifier: Apache-2.0
"""Comm of our own between CPU workers: shared memory inside a host, mutual TLS 1.3 between hosts.

This file is the seam: collectives in terms of `exchange`, and which generation is current. `mesh_door` forms a
generation, `mesh_pump` moves its bytes, `mesh_link` frames them. Unlike gloo, a wait ends the moment a peer dies or
`abort` is called, and a generation can be followed by the next at any time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from unisono.comm.mesh_arena import Arenas
from unisono.comm.mesh_door import Door, Meeting
from unisono.comm.mesh_loss import Loss
from unisono.comm.mesh_private import Joins
from unisono.comm.mesh_pump import Pump, as_tensor
from unisono.comm.mesh_shared import SHARED_BYTES
from unisono.comm.seam import DONE, Message, Op, Pending
from unisono.comm.sharing import Loan
from unisono.comm.slicing import slices
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.wire.certificate import Certificate

_GATHER, _BROADCAST, _SCATTER, _COLLECT = -1, -2, -3, -4  # tags of our own; those of callers are not negative


class MeshComm:
    """`address` is how others reach this worker: put it into the membership. Tensors must be in CPU memory.

    `folder` is private to this user; workers with the same `host` meet through sockets in theirs, others by TCP
    on `bind`, the IP address of this machine that they can reach (none: nobody may call from elsewhere).
    `patience_s` limits the forming of a generation, and any one wait for a peer that says nothing. `shared_bytes` is
    what this worker may share with others of its host; 0: tensors go through the sockets there.
    """

    def __init__(
        self,
        worker: int,
        folder: Path,
        host: str = "",
        bind: str = "",
        credentials: Certificate | None = None,
        patience_s: float = 1800.0,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        self.worker, self.patience_s = worker, patience_s
        self.rank, self.size, self.generation = 0, 1, 0
        self._gate = threading.Lock()  # guards what abort() reads and writes
        self._before = 0  # generations below this are over
        self._closed = False
        self._door = Door(worker, folder, host, bind, credentials, shared_bytes)
        self._arenas = Arenas(enabled=shared_bytes > 0)
        self._joins = Joins()
        self._pump = Pump(0)
        self._meeting: Meeting | None = None
        self.address = self._door.address.encode()
        _OPEN.add(self)

    def reconfigure(self, membership: Membership) -> None:
        self._pump.retire()
        self._joins.forget()
        self.rank = membership.rank_of(self.worker)
        self.size = len(membership.members)
        self.generation = membership.generation
        if self.size > 1 and len(membership.addresses) != self.size:
            raise ValueError(f"{self.size} members with {len(membership.addresses)} addresses")
        self._meeting = Meeting(self._door, membership, self.patience_s, self._over)
        try:
            lines = self._meeting.run()
        except PeerLost as error:
            self._enter(Pump(self.generation))
            self._pump.fail(Loss(error.what, error.worker, error.cause))  # later calls shall say the same
            raise
        finally:
            self._meeting = None
        pump = Pump(self.generation, self.worker, lines, membership.members, self.patience_s, self._arenas)
        self._enter(pump)
        if loss := self._over():  # aborted after the meeting and before abort() could see the pump
            pump.fail(loss)
        # Formed means formed for all: one who leaves again at once must not break the others' connecting.
        self.gather(torch.zeros(1))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        return self._pump.exchange(sends, receives, tag)

    def borrow(self, receives: Sequence[Message], tag: int) -> Loan:
        return self._pump.borrow(receives, tag)

    def empty(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A vector that workers of this host read where it is: for what is sent in every step, such as a bucket."""
        return self._arenas.empty(length, dtype)

    def private(self, tensor: Tensor) -> Tensor | None:
        return as_tensor(self._arenas.private(tensor.data_ptr(), tensor.nbytes), tensor)

    def joined(self, kept: Sequence[Tensor]) -> Tensor | None:
        extents = [
            self._arenas.extent(part.data_ptr(), part.nbytes) or self._pump.extent(part.data_ptr(), part.nbytes)
            for part in kept
        ]
        known = [extent for extent in extents if extent is not None]
        if len(known) < len(kept):
            return None
        memory = self._joins.joined(known)
        return None if memory is None else torch.frombuffer(memory, dtype=kept[0].dtype)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.contiguous()
        result = [own.clone() if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        others = self._others()
        sends = [Message(rank, own) for rank in others]
        self.exchange(sends, [Message(rank, result[rank]) for rank in others], _GATHER).wait()
        return result

    def broadcast(self, tensor: Tensor, root: int) -> None:
        own = tensor.contiguous()
        if self.rank == root:
            self.exchange([Message(rank, own) for rank in self._others()], [], _BROADCAST).wait()
        else:
            self.exchange([], [Message(root, own)], _BROADCAST).wait()
            if own is not tensor:
                tensor.copy_(own)

    def reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        """Every rank combines its slice of all, in rank order, and sends it to all."""
        own = tensor.contiguous()
        flat = own.view(-1)
        owned = slices(flat.numel(), self.size)
        mine = flat[owned[self.rank]]
        rows = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        others = self._others()
        sends = [Message(rank, flat[owned[rank]]) for rank in others]
        self.exchange(sends, [Message(rank, rows[rank]) for rank in others], _SCATTER).wait()
        total = rows[0].clone()
        for row in rows[1:]:
            torch.add(total, row, out=total) if op == "sum" else torch.maximum(total, row, out=total)
        mine.copy_(total)
        receives = [Message(rank, flat[owned[rank]]) for rank in others]
        self.exchange([Message(rank, mine) for rank in others], receives, _COLLECT).wait()
        if own is not tensor:
            tensor.copy_(own)
        return DONE

    def abort(self, before: int) -> None:
        with self._gate:
            self._before = max(self._before, before)
            pump = self._pump
            if not self._closed:
                self._door.knock()
        if pump.generation < before:
            pump.fail(_given_up(pump.generation))

    @property
    def served(self) -> int:
        """Grows while bytes come or go, in this generation."""
        return self._pump.served

    @property
    def notice(self) -> str:
        """Why workers of this host do not share memory; empty when they do."""
        return self._door.notice

    def missing(self) -> list[int]:
        """From any thread: the workers whom this one is waiting for, if it is waiting."""
        meeting = self._meeting
        return meeting.missing() if meeting is not None else self._pump.missing()

    def unheard(self) -> list[int]:
        """From any thread: the workers from whom nothing has come for a while, though whoever waits says so."""
        return self._pump.unheard()

    def drop(self) -> None:
        """A fault for tests: from now on this worker neither reads nor writes, as if its cable were cut."""
        with self._gate:
            self._door.dropped = True
            self._pump.drop()
            if not self._closed:
                self._door.knock()

    def close(self) -> None:
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._pump.retire()
        self._joins.forget()
        self._arenas.forget()
        self._door.close()
        _OPEN.discard(self)

    def _others(self) -> list[int]:
        """Starting with the next rank: if all began with rank 0, its link would be the bottleneck."""
        return [rank % self.size for rank in range(self.rank + 1, self.rank + self.size)]

    def _over(self) -> Loss | None:
        return _given_up(self.generation) if self.generation < self._before else None

    def _enter(self, pump: Pump) -> None:
        with self._gate:
            self._pump = pump
            if self._door.dropped:
                pump.drop()

    def _forget(self) -> None:
        self._closed, self._gate = True, threading.Lock()  # the old one may be held by a thread that is not here
        self._pump.forget()
        self._joins.forget()
        self._arenas.forget()
        self._door.forget()


def _given_up(generation: int) -> Loss:
    return Loss(f"generation {generation} was aborted", cause="its members change, or the run ends")


_OPEN: weakref.WeakSet[MeshComm] = weakref.WeakSet()


def _forget_all() -> None:
    """A forked loader process must not keep our connections open: the others would not learn that we died."""
    for comm in list(_OPEN):
        comm._forget()


os.register_at_fork(after_in_child=_forget_all)
