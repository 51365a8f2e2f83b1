# SPDX-License-Identifier: Apache-2.0
"""What becomes of the inner optimizer's state from round to round: each replica keeps its own, all begin anew, or mean.

*keep*: it belongs to the replica and goes where that goes (`carried`). *reset*: every replica begins every round
without any. *average*: all begin with the mean of what they ended with, which is then the run's state and not a
replica's. Each keeps a round a transaction: until `commit`, nothing has happened.
"""

from __future__ import annotations

from typing import Protocol

import torch

from unisono.comm.reducers.seam import Reducer
from unisono.comm.tree import Landing
from unisono.core.errors import SetupError
from unisono.parallel.carried import Carried
from unisono.parallel.inner import Inner
from unisono.parallel.sums import Sums, wide


class InnerStates(Protocol):
    def begin_round(self, levels: int) -> None: ...

    def begin(self, replica: int) -> None:
        """Give the optimizer the state with which this replica begins its round."""

    def end(self, replica: int, weight: float, landing: Landing) -> None:
        """Take it back. `weight`: the replica's share of the round; `landing`: its place in the tree."""

    def reduce(self, reducer: Reducer, tag: int) -> None:
        """Finish, over all workers, what the next round begins with."""

    def commit(self) -> None: ...

    def rest(self) -> None:
        """Between replicas and rounds: the optimizer shows what belongs to the run."""

    def taken_in(self) -> None:
        """The optimizer has been given another state, from a checkpoint or from another worker."""


class Keep:
    """`shared`: something else of the microbatch is carried beside it. Whoever has `carried` begins and commits it."""

    def __init__(self, inner: Inner, carried: Carried, shared: bool = False) -> None:
        self._inner, self._carried, self._shared = inner, carried, shared

    def begin_round(self, levels: int) -> None:
        pass

    def begin(self, replica: int) -> None:
        self._inner.write({} if self._inner.is_empty else self._carried[replica])

    def end(self, replica: int, weight: float, landing: Landing) -> None:  # noqa: ARG002
        self._inner.read({} if self._inner.is_empty else self._carried.stage(replica, copied=self._shared))

    def reduce(self, reducer: Reducer, tag: int) -> None:
        pass

    def commit(self) -> None:
        pass

    def rest(self) -> None:
        self._inner.optimizer.state.clear()

    def taken_in(self) -> None:
        self.rest()


class Reset:
    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def begin_round(self, levels: int) -> None:
        pass

    def begin(self, replica: int) -> None:  # noqa: ARG002
        self.rest()

    def end(self, replica: int, weight: float, landing: Landing) -> None:  # noqa: ARG002
        self.rest()

    def reduce(self, reducer: Reducer, tag: int) -> None:
        pass

    def commit(self) -> None:
        pass

    def rest(self) -> None:
        self._inner.optimizer.state.clear()

    def taken_in(self) -> None:
        self.rest()


class Average:
    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        for name, like in inner.tensors.items():
            if not like.is_floating_point():
                raise SetupError(
                    f"the optimizer's {name} is of {like.dtype} numbers, which have no mean",
                    do='use inner_state="keep" or "reset"',
                )
        self._room = inner.blank()  # of one replica
        self._begins = inner.initial()  # what all begin a round with
        self._names = list(self._room)
        self._sums = Sums(list(self._room.items()))

    def begin_round(self, levels: int) -> None:
        self._sums.make_room(levels)

    def begin(self, replica: int) -> None:  # noqa: ARG002
        self.rest()

    @torch.no_grad()
    def end(self, replica: int, weight: float, landing: Landing) -> None:  # noqa: ARG002
        self._inner.read(self._room)
        for position, name in enumerate(self._names):
            value = self._room[name]
            self._sums.land(position, value.to(wide(value.dtype)) * weight, landing)

    def reduce(self, reducer: Reducer, tag: int) -> None:
        for bucket in range(self._sums.buckets):
            reducer.reduce(self._sums.parts(bucket, reducer.parts), tag + bucket)

    def commit(self) -> None:
        if self._names:
            totals = {name: self._sums.total(position) for position, name in enumerate(self._names)}
            self._inner.divide(totals, self._begins)

    def rest(self) -> None:
        self._inner.write(self._begins)

    def taken_in(self) -> None:
        self._inner.read(self._begins)
        self.rest()
