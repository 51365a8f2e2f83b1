# SPDX-License-Identifier: Apache-2.0
"""Back to the newest checkpoint in the middle of a run: when a part of the state is lost that nobody else had.

Whoever can read the checkpoint takes it up; then everybody meets again, and the others copy. Called by the job when its
strategy says that slices are lost, on all workers alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unisono.core import events
from unisono.core.comm_words import describe_rolled_back
from unisono.core.errors import PeerLost, SlicesLost
from unisono.parallel.asynchronous import Asynchronous
from unisono.train.capturing import take_up
from unisono.train.resuming import open_home

if TYPE_CHECKING:
    from unisono.train.job import Job


def go_back(job: Job, lost: SlicesLost) -> None:
    """Always raises: `PeerLost`, after which all meet again; or `lost`, where there is nothing to go back to."""
    job.checkpoints.await_copy()
    home = open_home(job.context.spec.model_copy(update={"resume": "auto"}), job.context.run_dir, False)
    mine = home.found.step if home.found else -1
    newest = max(int(row.item()) for row in job.comm.gather(torch.tensor([mine])))
    if newest < 0:
        raise lost
    before, back = job.state.step, f"back to the checkpoint of step {newest}"
    if isinstance(job.strategy, Asynchronous):
        whole, broken = job.strategy.undone(before - newest)
        rolled = events.RolledBack(step=before, to_step=newest, updates=whole + broken, under_way=broken)
        job.untold.append(rolled)
        back = describe_rolled_back(rolled)
    if mine < newest:
        job.session.distrust()
    else:
        take_up(job, home)
    text = f"step {before}: {lost.what}; {back}"
    job.untold.append(events.Notice(code="slices-lost", text=text))
    raise PeerLost("the training goes back to a checkpoint", cause=lost.what)
