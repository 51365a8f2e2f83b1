# SPDX-License-Identifier: Apache-2.0
"""A user's script for tests of checkpoints: that of `train_decoder`, which before its first step takes up checkpoints
from one store after another, and saves at once what it has then. "stores.json" says from where to where.

From the last of them it goes on with the training.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_decoder import train

import unisono
from unisono.checkpoint.store import open_store
from unisono.train.capturing import take_up
from unisono.train.resuming import open_home


class TakesUp(unisono.Callback):
    def on_start(self, trainer: Any) -> None:
        job = trainer._job
        own, members = job.checkpoints.store, job.session.membership.members
        for source, target in json.loads(Path("stores.json").read_text()):
            spec = job.context.spec.model_copy(update={"checkpoint_to": source})
            take_up(job, replace(open_home(spec, job.context.run_dir, False), interval=job.checkpoints.interval))
            job.checkpoints.store = own and open_store(target)  # only the first rank of a replica has one
            job.checkpoints.saved_step = -1
            job.checkpoints.finish(job.state.step, members, job.comm)
        job.checkpoints.store = own
        job.session.activity.step = job.state.step


if __name__ == "__main__":
    train(callbacks=[TakesUp()])
