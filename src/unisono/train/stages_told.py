# SPDX-License-Identifier: Apache-2.0
"""What a replica of several ranks tells of itself: how the model was cut, and how full its pipeline is, with a picture.

Called by the trainer after a step, on all ranks of a replica at once. The first replica speaks.
"""

from __future__ import annotations

import contextlib

from unisono.core import events
from unisono.parallel.pipeline_picture import draw
from unisono.parallel.pipeline_timetable import Slot, Timetable, timetable
from unisono.train.job import Job

FROM_STEP, EVERY = 3, 500  # the first steps are slower: everything is new to the machine
_TOLD = "stages-timed"
_KINDS = "FBIW"
_NUMBERS = 5  # of a slot
_MOST = 4096  # slots of a rank


def tell_stages(job: Job, step: int) -> None:
    pipeline = job.pipeline
    if pipeline is None or step < FROM_STEP or (_TOLD in job.notices and step % EVERY):
        return
    slots = pipeline.slots[:_MOST]
    if len({slot.chunk for slot in slots}) != pipeline.plan.chunks:  # a short microbatch, at the end of an epoch
        return
    job.notices.add(_TOLD)
    most = max(int(row[0]) for row in job.inner.rows([len(slots)]))
    mine = [float(number) for slot in slots for number in _packed(slot)]
    rows = job.inner.rows([len(slots), pipeline.bubble_share, *mine, *[0.0] * (_NUMBERS * (most - len(slots)))])
    mesh = job.context.spec.replica
    ranks = [mesh.rank({"pp": stage, "fsdp": 0, "tp": 0}) for stage in range(mesh.pp)]
    measured = tuple(slot for at, rank in enumerate(ranks) for slot in _unpacked(at, rows[rank]))
    plan = pipeline.plan
    job.emit(
        events.StagesTimed(
            step=step,
            schedule=plan.schedule,
            chunks=plan.chunks,
            bubbles=[round(rows[rank][1], 4) for rank in ranks],
            predicted=round(timetable(plan).bubble_share, 4),
        )
    )
    if job.is_first:
        with contextlib.suppress(OSError):
            title = f"one microbatch of step {step}, measured: {plan.schedule}"
            job.context.run_dir.pipeline.write_text(draw(Timetable(plan, measured), title, "s"))


def _packed(slot: Slot) -> tuple[float, ...]:
    return (slot.stage, _KINDS.index(slot.kind), slot.chunk, slot.start, slot.stop)


def _unpacked(rank: int, row: list[float]) -> list[Slot]:
    numbers = row[2:]
    found = []
    for at in range(0, int(row[0]) * _NUMBERS, _NUMBERS):
        stage, kind, chunk, start, stop = numbers[at : at + _NUMBERS]
        found.append(Slot(rank, int(stage), _KINDS[int(kind)], int(chunk), start, stop))
    return found
