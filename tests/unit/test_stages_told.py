# SPDX-License-Identifier: Apache-2.0
"""What a pipeline tells of itself: which steps, which microbatches, and the numbers of all stages in one event."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.cli.show import show_run
from unisono.comm.inner import Alone
from unisono.core import events
from unisono.core.mesh import Mesh
from unisono.core.run_dir import RunDir
from unisono.parallel.pipeline_timetable import Plan, timetable
from unisono.train.stages_told import EVERY, FROM_STEP, tell_stages


class Both(Alone):
    """Two ranks that have measured the same."""

    size = 2

    def rows(self, numbers: Any) -> list[list[float]]:
        return [list(map(float, numbers))] * 2


def job_with(chunks: int, folder: Path, ran: int | None = None) -> tuple[Any, list[events.Event]]:
    plan = Plan("1f1b", 2, 1, chunks)
    slots = tuple(slot for slot in timetable(Plan("1f1b", 2, 1, ran or chunks)).slots if slot.rank == 0)
    told: list[events.Event] = []
    job = SimpleNamespace(
        pipeline=SimpleNamespace(slots=slots, bubble_share=0.25, plan=plan),
        inner=Both(),
        notices=set(),
        context=SimpleNamespace(spec=SimpleNamespace(replica=Mesh(pp=2)), run_dir=RunDir(folder)),
        emit=told.append,
        is_first=True,
    )
    return job, told


def test_one_event_and_a_picture_tell_of_all_stages(tmp_path: Path) -> None:
    job, told = job_with(4, tmp_path)
    for step in range(1, EVERY + 1):
        tell_stages(job, step)
    assert [(event.step, event.bubbles) for event in told] == [(FROM_STEP, [0.25, 0.25]), (EVERY, [0.25, 0.25])]
    assert told[0].predicted == pytest.approx(0.2)
    assert told[0].text == "1f1b, 4 chunks on 2 ranks: 25% bubble (20% by the schedule), worst rank 25%"
    assert (tmp_path / "pipeline.svg").read_text().startswith("<svg")


def test_a_short_microbatch_is_not_taken_for_the_rule(tmp_path: Path) -> None:
    job, told = job_with(4, tmp_path, ran=2)
    tell_stages(job, FROM_STEP)
    assert not told
    job.pipeline.slots = job_with(4, tmp_path)[0].pipeline.slots
    tell_stages(job, FROM_STEP + 1)
    assert len(told) == 1


def test_without_a_pipeline_there_is_nothing_to_tell(tmp_path: Path) -> None:
    job, told = job_with(4, tmp_path)
    job.pipeline = None
    tell_stages(job, FROM_STEP)
    assert not told


@pytest.mark.parametrize("drawn", [True, False])
def test_show_names_the_picture_where_there_is_one(
    drawn: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path)
    started = events.RunStarted(name="staged", script="train.py", workers=1, host="h", pid=0, time_s=1.0)
    timed = events.StagesTimed(step=3, schedule="1f1b", chunks=4, bubbles=[0.25, 0.25], predicted=0.2, time_s=2.0)
    run_dir.events.write_text("".join(json.dumps(events.as_dict(event)) + "\n" for event in (started, timed)))
    if drawn:
        run_dir.pipeline.write_text("<svg/>")
    show_run(str(tmp_path))
    shown = capsys.readouterr().out
    assert "pipeline  1f1b, 4 chunks on 2 ranks" in shown
    assert (f"plot      {run_dir.pipeline}" in shown) == drawn
