# SPDX-License-Identifier: Apache-2.0
"""A replica of several ranks: inside, torch's own parallelism; between replicas, all-reduce as always.

Every rank runs this strategy on its part of the model and talks to its like in other replicas: gradients of the part
are added in the fixed tree over microbatches. After the reduction the ranks of a replica agree that all of them have
theirs, so that no replica is ever half a step ahead. Called by the loop through `Strategy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.comm.inner import Inner, agreed
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import MakeReducer
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.errors import PeerLost, SetupError
from unisono.core.mesh import Mesh
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.buffers import Buffers
from unisono.parallel.carried import Make
from unisono.parallel.norms import squared_norm
from unisono.parallel.strategy import Compute, Microbatch, Reduced

if TYPE_CHECKING:  # they load much of torch.distributed, which most trainings never need
    from unisono.parallel.pipeline import Pipeline
    from unisono.parallel.shards import Shards
    from unisono.parallel.shared_norms import SharedNorms


Within = Callable[..., Any]  # calls a function that computes with pieces of the model, or reads its weights


def call(compute: Callable[..., Any], *args: Any) -> Any:
    return compute(*args)


@dataclass(frozen=True)
class Group:
    """A rank's place in its replica."""

    mesh: Mesh
    inner: Inner
    shards: Shards
    one_voice: Callable[[list[list[float]]], list[float]] = lambda rows: rows[0]  # the notes of all ranks in one
    before_update: Callable[[], None] = lambda: None
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext  # of a microbatch's loss and its backward pass
    pipeline: Pipeline | None = None
    norms: SharedNorms | None = None
    within: Within = call

    @property
    def place(self) -> dict[str, int]:
        return self.mesh.place(self.inner.rank)

    def norm(self) -> float:
        """Of the step's gradient over the whole model: parts added in the order of ranks, copies counted once."""
        shards, sharded, common = self.shards, 0.0, 0.0
        for name, parameter in shards.local.items():
            if parameter.grad is not None and name not in shards.copies:
                square = float(squared_norm(parameter.grad))
                share = shards.share(name)
                sharded, common = (sharded + square * share, common) if share else (sharded, common + square)
        rows = self.inner.rows([sharded, common])
        # What is no DTensor is the same on all ranks of its stage: the first of each stage counts it.
        firsts = [self.mesh.rank({"pp": stage, "fsdp": 0, "tp": 0}) for stage in range(self.mesh.pp)]
        return math.sqrt(math.fsum(row[0] for row in rows) + math.fsum(rows[rank][1] for rank in firsts))


class Grouped(AllReduce):
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        before_update: Callable[[], None],
        random_state: Callable[[Microbatch], int],
        make_reducer: MakeReducer = DirectReducer,
        carry: Make = lambda _: {},
        *,
        group: Group,
    ) -> None:
        """`model` is the real one; what is added, updated and moved is `group.shards`."""
        super().__init__(group.shards.shadow, optimizer, comm, before_update, random_state, make_reducer, carry)
        self.group, self._apart = group, group.shards.alike
        self._buffers = Buffers(model)
        if group.pipeline is None:
            group.shards.tell_gradients(self._deliver)
        self._share = 1.0  # of the microbatch's samples that this rank computes
        self._samples = 0  # of the microbatch, where ranks share them

    def take(self, batch: Any, count: Callable[[Any], float] | None) -> Any:
        """This rank's part of a microbatch: ranks that shard the model between them also share out its samples."""
        ways, at = self.group.mesh.fsdp, self.group.place["fsdp"]
        if ways == 1:
            return batch
        self._samples = total = samples_in(batch)
        first, last = total * at // ways, total * (at + 1) // ways
        self._share = 0.0
        if self.group.norms is not None:
            self.group.norms.has_samples = first < last
        if first < last:
            part = narrowed(batch, first, last)
            self._share = (last - first) / total if count is None else float(count(part)) / float(count(batch))
            # Stages know what to do with chunks without tokens, and batch norm wants its own samples.
            if self._share or self.group.norms is not None or self.group.pipeline is not None:
                return part
        # It must take part in the collectives all the same, with another's sample: of no tokens a mean is no number.
        each = (narrowed(batch, one, one + 1) for one in range(total))
        return next(one for one in each if count is None or count(one))

    def through_stages(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of the microbatch in hand, computed by all stages, backward pass included."""
        assert self.group.pipeline is not None
        ways = self.group.mesh.fsdp
        return self.group.pipeline.run(inputs, targets, self._factor, (self._samples, ways) if ways > 1 else None)

    @property
    def _factor(self) -> float:
        """What the loss is multiplied with before the backward pass."""
        return self._current.weight * self._share * self.scale.factor

    def begin_step(self, weights: Sequence[float]) -> None:
        self.group.shards.follow()
        super().begin_step(weights)

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        super().begin_microbatch(microbatch)
        if self.group.norms is not None:
            self.group.norms.forget()
        if at := self.group.place["fsdp"]:  # other samples, so other dropout
            seeds.apply(seeds.derive(self.random_state(microbatch), "part", at))

    def backward(self, loss: Tensor) -> None:
        share, factor, self._share = self._share, self._factor, 1.0
        value = loss.detach().double() * share if share else torch.zeros(())  # of no tokens it may be no number
        self._losses[self._current.index] = lambda: float(value)
        if loss.requires_grad:
            (loss * factor).backward()  # type: ignore[no-untyped-call]
        for name, gradient in self.group.shards.gradients():
            if gradient is not None:
                self._deliver(name, gradient)
        self._refuse_touched_buffers()
        if self.group.norms is not None:
            self.group.norms.settle()
        self._end_microbatch()

    def _deliver(self, name: str, gradient: Tensor) -> None:
        assert self._gradients is not None
        self._gradients.deliver(name, gradient)

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        (compute,) = turns
        self.begin_microbatch(microbatch)
        if microbatch.weight:
            with self.group.scope():
                self.backward(compute())
        else:
            self.end_empty_microbatch()

    def _refuse_touched_buffers(self) -> None:
        """Batch norm's are not moved yet, except in a pipeline."""
        if self.group.mesh.fsdp > 1 and (touched := self._buffers.touched()):
            raise SetupError(
                f"{touched[0]} changes in the forward pass, which ranks that share a microbatch cannot follow",
                cause="a buffer that follows the samples sees a part of the microbatch on each fsdp rank",
                do="leave fsdp out of --mesh, or with pp use layer or group norm in place of batch norm",
            )

    def reduce(self, notes: Sequence[float]) -> Reduced:
        try:
            self._add_losses()
            reduced = super().reduce(self.group.one_voice(self.group.inner.rows(notes)))
        except PeerLost as lost:
            if not lost.agreed:
                self.group.inner.agree(False)
            raise agreed(lost) from None
        if not self.group.inner.agree(True):
            raise agreed(PeerLost("another rank of this replica has lost a peer"))
        return reduced

    def _add_losses(self) -> None:
        """A microbatch's loss is that of all its samples, wherever they were computed. The same on every rank."""
        if self.group.mesh.fsdp == 1:
            return
        mine = sorted(self._losses)
        rows = self.group.inner.rows([self._losses[i]() for i in mine])
        beside = self.group.mesh.beside(self.group.inner.rank, "fsdp")
        for column, index in enumerate(mine):
            self._losses[index] = partial(math.fsum, [rows[rank][column] for rank in beside])

    def step(self, loss: float, again: Callable[[], float]) -> None:
        self.group.before_update()
        super().step(loss, again)

    def norm(self) -> float:
        return self.group.norm()


def samples_in(batch: Any) -> int:
    """The length of the first dimension, the same for every tensor of a batch."""
    lengths = {len(tensor) for tensor in _tensors(batch)}
    if len(lengths) != 1:
        raise SetupError(
            "a batch cannot be shared out between fsdp ranks",
            cause=f"its tensors have different lengths: {sorted(lengths)}" if lengths else "it holds no tensors",
            do="let samples be the first dimension of every tensor of a batch",
        )
    return lengths.pop()


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [tensor for item in batch for tensor in _tensors(item)]
    raise SetupError(
        f"a batch with a {type(batch).__name__} in it cannot be shared out between fsdp ranks",
        do="let batches be made of tensors",
    )


def narrowed(batch: Any, first: int, last: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[first:last]
    if isinstance(batch, dict):
        return {key: narrowed(value, first, last) for key, value in batch.items()}
    items = [narrowed(item, first, last) for item in batch]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
