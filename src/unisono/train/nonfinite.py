# SPDX-License-Identifier: Apache-2.0
"""A loss that is NaN or infinite: whose microbatch it is, and the line of the script that it comes from.

A microbatch can be computed again exactly as it was, so its owner looks for the line by doing so, with every operation
watched, and tells the others: all end with the same words. Called by the loops after a step's reduction.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.core import events, seeds
from unisono.core.errors import NonFiniteLoss, PeerLost
from unisono.elastic.activity import user_frame
from unisono.parallel.strategy import Microbatch, Reduced
from unisono.train.job import Job

_LINE_BYTES = 1024


def check_finite(
    job: Job,
    reduced: Reduced,
    step: int,
    find_line: Callable[[int], str],
    on_nonfinite: Literal["stop", "skip"] = "stop",
) -> bool:
    """Whether the step may be taken; raises where a loss that is not finite should end the run.

    `find_line(microbatch)` is asked on the worker that computed it.
    """
    bad = [i for i, loss in enumerate(reduced.losses) if reduced.weights[i] and not math.isfinite(loss)]
    if not bad:
        overflow = job.prepared.scale.accept(job.request.model.parameters(), job.inner.agree)
        if overflow:
            job.commit(events.StepSkipped(step=step + 1, because=overflow))
        return not overflow
    assert job.session.membership is not None
    owner = job.session.membership.owner_of(bad[0])
    what = f"the loss is {reduced.losses[bad[0]]} at step {step + 1}, microbatch {bad[0]}, on worker {owner}"
    if on_nonfinite == "skip":
        job.commit(events.StepSkipped(step=step + 1, because=what))
        return False
    raise NonFiniteLoss(
        what,
        where=_told_by(job, owner, lambda: find_line(bad[0])),
        cause="often a learning rate that is too high, a division by zero in the loss, or a bad sample",
        do='lower the learning rate, clip gradients, look at that batch; or go on with on_nonfinite="skip"',
    )


def _told_by(job: Job, owner: int, find: Callable[[], str]) -> str:
    """What one worker finds, on all of them."""
    found = ""
    if job.context.worker == owner:
        job.session.activity.busy = "looking for the line that made the loss not finite"
        try:
            found = find()
        except (PeerLost, KeyboardInterrupt):
            raise
        except Exception as error:  # a fault of the search must not hide what it was to explain
            job.notice_once("line-not-found", f"the line could not be looked for: {type(error).__name__}: {error}")
        finally:
            job.session.activity.busy = ""
    row = found.encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
    rows = job.comm.gather(torch.tensor(list(row), dtype=torch.uint8))
    assert job.session.membership is not None
    told = bytes(rows[job.session.membership.rank_of(owner)].tolist())
    return told.rstrip(b"\0").decode(errors="ignore")


def line_of(job: Job, microbatch: Microbatch, turns: Sequence[Callable[[], Tensor]]) -> str:
    """Compute it once more and name the user's line of the first operation whose result is as bad as the loss."""
    if job.request.batch_norm == "synchronised":
        return ""  # its forward pass needs the other workers
    if len(turns) > 1:
        return _line_of_turns(job, microbatch, turns)
    seeds.apply(job.strategy.random_state(microbatch))
    return _look_at(turns[0])


def _look_at(compute: Callable[[], Tensor], found: Callable[[Tensor], None] = lambda _: None) -> str:
    watch = _Watch()  # type: ignore[no-untyped-call]
    with watch:
        loss = compute()
    found(loss)
    return watch.first_nan if torch.isnan(loss).any() else watch.first_infinity if torch.isinf(loss).any() else ""


class _Seen(Exception):
    """Nothing more is to be computed."""


def _line_of_turns(job: Job, microbatch: Microbatch, turns: Sequence[Callable[[], Tensor]]) -> str:
    """Each turn goes on from the weights that the one before left: all are gone through again, up to the bad one."""
    lines: list[str] = []

    def watched(compute: Callable[[], Tensor], is_last: bool) -> Tensor:
        losses: list[Tensor] = []
        line = _look_at(compute, losses.append)
        if line or is_last:
            lines.append(line)
            raise _Seen
        return losses[0]

    job.strategy.begin_step([1.0 if i == microbatch.index else 0.0 for i in range(job.spec.microbatches)])
    with contextlib.suppress(_Seen):
        last = max(turn for turn, share in enumerate(microbatch.turns) if share)
        again = [partial(watched, compute, turn == last) for turn, compute in enumerate(turns)]
        job.strategy.forward_backward(microbatch, *again)
    job.abandon()
    return lines[0] if lines else ""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the result of every operation, and remembers where the first bad one of each kind was asked for."""

    first_nan = first_infinity = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func):  # memory that nobody has written yet may hold anything
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                if not self.first_nan and bool(torch.isnan(leaf).any()):
                    self.first_nan = user_frame(sys._getframe(1))
                if not self.first_infinity and bool(torch.isinf(leaf).any()):
                    self.first_infinity = user_frame(sys._getframe(1))
        return result
