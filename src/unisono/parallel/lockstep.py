# SPDX-License-Identifier: Apache-2.0
"""Several microbatches of one worker in lockstep: each runs until it needs a sum over all of them, then the next.

One thread a microbatch, one baton: only its holder runs, in microbatch order, so random state and gradient order are as
if they ran one after the other. Where all have arrived, the last one combines what they brought (and, through the
callback, what other workers brought). This is what lets synchronised batch norm be exact on any number of workers.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import SetupError

Combine = Callable[[Sequence[Tensor]], Tensor]  # what each local microbatch brought -> the sum over all microbatches


class LockstepBroken(Exception):
    """Another microbatch of this worker failed; its exception is the one that is shown."""


class Lockstep:
    """Runs `tasks`; inside them, `meet` may be called, by all of them equally often.

    `enter(position)` says who runs from now on; `park` and `unpark` carry what belongs to one microbatch, beside its
    random state, over the time in which others run.
    """

    def __init__(
        self, combine: Combine, enter: Callable[[int], None], park: Callable[[], Any], unpark: Callable[[Any], None]
    ) -> None:
        self._combine, self._enter, self._park, self._unpark = combine, enter, park, unpark
        self._turn = threading.Condition()
        self._holder = 0
        self._count = 0
        self._finished = 0
        self._brought: list[Tensor] = []
        self._place = ""
        self._total: Tensor | None = None
        self._errors: list[BaseException] = []

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        self._count, self._holder, self._finished, self._brought, self._errors = len(tasks), 0, 0, [], []
        threads = [
            threading.Thread(
                target=self._run_one, args=(position, task), name=f"unisono-lockstep-{position}", daemon=True
            )
            for position, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def meet(self, mine: Tensor, place: str) -> Tensor:
        """Bring a vector; get the sum of all who come to this `place`. Returns with the baton in hand again."""
        position = self._holder  # whoever calls holds the baton, from whichever thread autograd runs it
        if self._finished or (self._brought and place != self._place):
            raise _unequal()
        self._place = place
        self._brought.append(mine)
        if position == self._count - 1:
            self._total = self._combine(self._brought)
            self._brought = []
        state = _random_state(), self._park()
        self._pass_on(position)
        self._await_turn(position)
        _restore(state[0])
        self._unpark(state[1])
        assert self._total is not None
        return self._total

    def _run_one(self, position: int, task: Callable[[], None]) -> None:
        try:
            self._await_turn(position)
            task()
            if self._brought:
                raise _unequal()
            self._finished += 1
        except LockstepBroken:
            return
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._pass_on(position)

    def _await_turn(self, position: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._holder == position or bool(self._errors))
            if self._errors:
                raise LockstepBroken
        self._enter(position)

    def _pass_on(self, position: int) -> None:
        with self._turn:
            self._holder = (position + 1) % self._count
            self._turn.notify_all()


def _unequal() -> SetupError:
    return SetupError(
        "microbatches of one step went through different numbers of batch norms",
        cause="the model's path depends on its data, and synchronised batch norm needs all of them at each one",
        do='use batch_norm="local"',
    )


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None


def _restore(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
