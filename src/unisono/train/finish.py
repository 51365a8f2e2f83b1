# SPDX-License-Identifier: Apache-2.0
"""The end of a training: agree on the final weights, write them, and say what it came to.

Called once, by the trainer or by a user's own loop, on every worker; the first worker writes and speaks for all. The
others wait until it has: if it dies before, another does it.
"""

from __future__ import annotations

import dataclasses

import torch

from unisono.checkpoint.weights import save_state
from unisono.core import events
from unisono.core.errors import PeerLost
from unisono.elastic.activity import AFTERWARDS
from unisono.train.job import Job
from unisono.train.options import Result
from unisono.wire.messages import Finished


def finish(job: Job, seconds: float) -> Result:
    job.tell_reading(at_once=True)  # before the workers compare weights, and so before the run's last word
    while True:
        try:
            result = _conclude(job, seconds)
            break
        except PeerLost as lost:
            job.reform(lost)
    job.session.station.tell(Finished(worker=job.context.worker))
    job.session.activity.now(AFTERWARDS)
    return result


def _conclude(job: Job, seconds: float) -> Result:
    state = job.state
    job.session.activity.now("comparing the final weights")
    digest = job.agree_on_weights()
    job.session.activity.now("saving the last checkpoint")
    assert job.session.membership is not None
    job.checkpoints.finish(state.step, job.session.membership.members, job.comm)
    metrics = {k: v for k, v in (state.history[-1] if state.history else {}).items() if k not in ("step", "epoch")}
    result = Result(
        weights_sha256=digest,
        steps=state.step,
        samples=state.samples,
        metrics=metrics,
        seconds=round(seconds, 3),
        fingerprint=job.fingerprint.model_dump(),
        workers=job.comm.size,
        microbatches=job.spec.microbatches,
        skipped_steps=state.skipped,
        stopped_early=state.stopped_early and (job.session.station.stop_because or state.stopped_early),
        weights_file=_save(job),
        history=state.history,
    )
    job.emit(events.RunFinished(result=dataclasses.asdict(result)))
    job.session.activity.now("waiting for the result to be saved")
    job.comm.gather(torch.zeros(1))
    return result


def _save(job: Job) -> str:
    """The weights' file name, or an empty string when it could not be written: a full disk loses no training."""
    weights = job.weights_of_all()
    if not job.is_first:
        return ""
    target = job.context.run_dir.weights
    try:
        save_state(weights, target)
    except (OSError, RuntimeError) as error:
        job.emit(events.Notice(code="weights-not-saved", text=f"{target} could not be written: {error}"))
        return ""
    return target.name
