# SPDX-License-Identifier: Apache-2.0
"""A training says what it is going to do: what it goes on from, what was changed on the way, how tensors travel.

Called once, when the workers have met; everything is told by the first of them.
"""

from __future__ import annotations

from typing import Any

from unisono.comm.mesh_address import hosts_of
from unisono.comm.transport import describe
from unisono.core import events
from unisono.train.job import Job
from unisono.train.meeting import transport_of
from unisono.train.resuming import Home, TakenUp


def announce(job: Job, home: Home, taken: TakenUp | None) -> None:
    healed = job.session.healed.workers
    if healed and job.worker_at(0) not in healed and not job.state.position:
        first = job.worker_at(0)
        job.notice_once("initial-weights", f"the workers built different initial weights; all now use worker {first}'s")
    steps = job.loader.steps_per_epoch
    limits = [steps * job.spec.epochs] if steps and job.spec.epochs else []
    limits += [job.spec.max_steps] if job.spec.max_steps else []
    per_epoch = None
    if steps and job.loader.samples:
        rest = job.loader.samples % job.spec.batch_size if job.spec.drop_last else 0
        per_epoch = job.loader.samples - rest
    for words in home.passed_over:
        job.emit(events.Notice(code="checkpoint-passed-over", text=words))
    if taken is not None:
        at, place = taken.manifest, home.store.url if home.store else ""
        job.emit(events.Resumed(step=at.step, digest=at.hash, url=place, differs=taken.differs))
    for code, text in job.prepared.words.items():
        job.notice_once(code, text)
    job.emit(
        events.Configured(
            job=job.spec.model_dump(),
            fingerprint=job.fingerprint.model_dump(),
            steps_total=min(limits) if limits else None,
            samples_per_epoch=per_epoch,
            data=_hash_of(job.request.data.dataset),
            transport=_transport(job),
        )
    )


def _transport(job: Job) -> str:
    """How tensors travel, in words."""
    membership = job.session.membership
    assert membership is not None
    workers, hosts = len(membership.members), len(set(hosts_of(membership)))
    spec = job.context.spec
    without_memory = getattr(job.comm, "notice", "")
    transport = transport_of(job.context, job.device.type)
    return describe(transport, hosts, workers, not spec.plaintext, without_memory, spec.backend)


def _hash_of(dataset: Any) -> str:
    """What stands for all the data, for the receipt; a user's own dataset may mean something else by that name."""
    found = getattr(dataset, "hash", "")
    return found if isinstance(found, str) else ""
