# SPDX-License-Identifier: Apache-2.0
"""Comm over torch process groups: gloo between CPU workers, NCCL between GPUs.

One process group object per generation, made directly and never registered as torch's global default, so that a
script may use `torch.distributed` for itself and so that a generation can be left behind whole. Members meet
through a file named by the membership, private to the run: no port to collide on.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch import Tensor

from unisono.comm.seam import DONE, Message, Op, Pending
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class _Works:
    """Several torch works as one Pending. Holds the tensors: gloo reads and writes their memory until the end."""

    works: list[tuple[Any, Tensor, int]]  # (work, tensor, peer)
    check: Callable[[], None]  # raises if the generation is over
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (where it arrives, where it is wanted)

    def wait(self) -> None:
        for work, _, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                self.check()
                raise _lost(peer, error) from None
        for arrived, target in self.staged:
            target.copy_(arrived)
        self.works, self.staged = [], []


def _lost(peer: int, error: RuntimeError) -> PeerLost:
    who = f"the worker at rank {peer}" if peer >= 0 else "another worker"
    return PeerLost(f"the connection to {who} broke", cause=str(error).splitlines()[0])


class ProcessGroupComm:
    """`backend` is ``gloo`` or ``nccl``; the tensors must live where that backend can reach them."""

    def __init__(self, worker: int, backend: str = "gloo", patience_s: float = 1800.0) -> None:
        self.worker, self.backend = worker, backend
        self.patience = datetime.timedelta(seconds=patience_s)
        self.rank, self.size, self.generation = 0, 1, 0
        self._group: Any = None
        self._before = 0  # generations below this are over
        self._news = threading.Event()  # of that, for whoever is forming one

    def reconfigure(self, membership: Membership) -> None:
        self.close()
        self.rank = membership.rank_of(self.worker)
        self.size = len(membership.members)
        self.generation = membership.generation
        self._raise_if_over()
        if self.size == 1:
            return
        files = _c10d.FileStore(membership.meeting_point, self.size)
        store = _c10d.PrefixStore(f"generation-{self.generation}", files)
        store.set_timeout(self.patience)
        make = _nccl if self.backend == "nccl" else _gloo
        self._group = self._formed(lambda: make(store, self.rank, self.size, self.patience))
        self._raise_if_over()  # abort() may have come before there was a group to drop
        # Formed means formed for all: one who leaves again at once must not break the others' connecting.
        self.gather(torch.zeros(1))

    def _formed(self, make: Callable[[], Any]) -> Any:
        """By a thread, which is left behind if the generation is over before all have come: nothing can wake it."""
        forming = _Forming(make, self._news)
        forming.start()
        while not forming.is_over:
            self._news.wait()
            self._news.clear()
            self._raise_if_over()
        if isinstance(forming.error, RuntimeError):
            raise _lost(-1, forming.error) from None
        if forming.error is not None:
            raise forming.error
        return forming.group

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        self._raise_if_over()
        if not sends and not receives:  # alone, there is not even a group
            return DONE
        group, nccl = self._group, self.backend == "nccl"
        works: list[tuple[Any, Tensor, int]] = []
        staged: list[tuple[Tensor, Tensor]] = []
        if nccl:  # a state that is copied to a joiner may lie in CPU memory
            sends = [Message(message.peer, self._within_reach(message.tensor)) for message in sends]
            reachable = [Message(message.peer, self._within_reach(message.tensor)) for message in receives]
            staged = [
                (a.tensor, b.tensor) for a, b in zip(reachable, receives, strict=True) if a.tensor is not b.tensor
            ]
            receives = reachable
        try:
            if nccl:  # it matches by order, not by tag, so a batch must be issued as one
                group._start_coalescing(torch.device("cuda"))
            # Receives first: a message that finds its buffer waiting needs no copy.
            works += [
                (group.recv([message.tensor], message.peer, tag), message.tensor, message.peer) for message in receives
            ]
            works += [
                (group.send([message.tensor], message.peer, tag), message.tensor, message.peer) for message in sends
            ]
            if nccl:
                batch = group._end_coalescing(torch.device("cuda"))
                works = [(batch, tensor, peer) for _, tensor, peer in works]
        except RuntimeError as error:
            raise _lost(-1, error) from None
        return _Works(works, self._raise_if_over, staged)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        own = self._within_reach(tensor)
        result = [torch.empty_like(own) for _ in range(self.size)]
        result[self.rank].copy_(own)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [Message(rank, own) for rank in others]
        self.exchange(sends, [Message(rank, result[rank]) for rank in others], _GATHER_TAG).wait()
        return [row.to(tensor.device) for row in result]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if self.size == 1:
            return
        others = [rank for rank in range(self.size) if rank != root]
        own = self._within_reach(tensor)
        sends = [Message(rank, own) for rank in others] if self.rank == root else []
        receives = [] if self.rank == root else [Message(root, own)]
        self.exchange(sends, receives, _BROADCAST_TAG).wait()
        if own is not tensor:
            tensor.copy_(own)

    def reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        if self.size == 1:
            return DONE
        self._raise_if_over()
        own = self._within_reach(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        try:
            works = _Works([(self._group.allreduce([own], options), own, -1)], self._raise_if_over)
        except RuntimeError as error:
            raise _lost(-1, error) from None
        if own is tensor:
            return works
        works.wait()
        tensor.copy_(own)
        return DONE

    def _within_reach(self, tensor: Tensor) -> Tensor:
        """Contiguous, and on the GPU where NCCL needs it; the tensor itself when it already is."""
        if self.backend == "nccl" and not tensor.is_cuda:
            tensor = tensor.cuda()
        return tensor.contiguous()

    def abort(self, before: int) -> None:
        self._before = max(self._before, before)
        self._news.set()
        group = self._group
        if group is None or self.generation >= before:
            return
        if self.backend == "nccl":
            group.abort()
        else:
            self._break(group)

    def _break(self, group: Any) -> None:
        """What is called abort in gloo wakes nobody. A receive that runs out of patience closes all of the group's
        connections, and with them ends whatever waits in it."""
        if self.size > 1:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], (self.rank + 1) % self.size, _NEVER_TAG).wait(_NO_PATIENCE)

    def _raise_if_over(self) -> None:
        if self.generation < self._before:
            raise PeerLost(f"generation {self.generation} was aborted", cause="its members change, or the run ends")

    def close(self) -> None:
        if self._group is not None and self.backend == "nccl":
            self._group.shutdown()
        elif self._group is not None:
            self._break(self._group)  # or it waits for what has not come, for as long as its patience lasts
        self._group = None


_GATHER_TAG, _BROADCAST_TAG, _NEVER_TAG = 1 << 28, (1 << 28) + 1, (1 << 28) + 2  # above any tag of a caller
_NO_PATIENCE = datetime.timedelta(milliseconds=1)


class _Forming(threading.Thread):
    """Makes a group: `news` is set when it is there, or cannot be. One that is left behind ends with its patience."""

    def __init__(self, make: Callable[[], Any], news: threading.Event) -> None:
        super().__init__(name="unisono-forming", daemon=True)
        self._make, self._news = make, news
        self.group: Any = None
        self.error: Exception | None = None
        self.is_over = False

    def run(self) -> None:
        try:
            self.group = self._make()
        except Exception as error:  # whoever waits for it looks at what it is
            self.error = error
        finally:
            self.is_over = True
            self._news.set()


def _nccl(store: _c10d.Store, rank: int, size: int, _: datetime.timedelta) -> Any:
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def _gloo(store: _c10d.Store, rank: int, size: int, patience: datetime.timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Loopback by its address: asking for a name would go through DNS, which takes seconds where there is none.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = patience
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, size, options)
