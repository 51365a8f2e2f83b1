# SPDX-License-Identifier: Apache-2.0
"""Workers are forked by a nursery that has torch loaded. Its death harms nobody, and another takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from multiproc.running import Started, run_unisono, start_unisono
from multiproc.scripts import ENDLESS, SMALL
from unisono.core import events


def nursery(it: Started) -> psutil.Process:
    def found() -> psutil.Process | None:
        return next((child for child in psutil.Process(it.pid).children() if child.name() == "nursery"), None)

    return it.until(found, "the nursery to start")


def test_a_killed_nursery_disturbs_no_worker_and_the_next_worker_comes_from_another(tmp_path: Path) -> None:
    with start_unisono(ENDLESS + "fit(**LONG)\n", tmp_path) as started:
        started.wait_for_steps(2)
        first = nursery(started)
        first.kill()
        before = len(started.events_of(events.StepFinished))
        started.wait_for_steps(before + 3)
        assert started.events_of(events.WorkerRemoved) == []
        os.kill(started.worker_pid(1), signal.SIGKILL)
        started.until(lambda: [e for e in started.events_of(events.MembershipChanged) if e.members == [0, 2]], "it")
        assert nursery(started).pid != first.pid
        started.send(signal.SIGTERM)
        finished = started.wait(timeout_s=20, expect=75)
    assert finished.result is not None
    (tmp_path / "again").write_text(str(finished.result["steps"]))
    again = run_unisono(ENDLESS + "fit(**LONG)\n", tmp_path, workers=1)
    assert again.weights_sha256 == finished.weights_sha256


def test_a_nursery_that_is_killed_before_it_has_borne_anybody_is_replaced_with_those_it_was_asked_for(
    tmp_path: Path,
) -> None:
    with start_unisono(SMALL + "fit()\n", tmp_path) as started:
        nursery(started).kill()
        finished = started.wait()
    assert finished.result is not None
    whys = {event.because for event in finished.events_of(events.WorkerRemoved)}
    assert whys == {"it could not be started: the process that starts workers was ended by SIGKILL"}
    assert finished.weights_sha256 == run_unisono(SMALL + "fit()\n", tmp_path, workers=1).weights_sha256


def test_a_worker_is_a_child_of_the_command_and_its_orphans_leave_no_zombies(tmp_path: Path) -> None:
    script = """
def orphan(step):
    if WORKER == 1 and step == 2:
        if not os.fork():
            if not os.fork():
                os.setsid()
                os._exit(0)
            os._exit(0)
        os.wait()


LONG["callbacks"].append(Every(orphan))
fit(**LONG)
"""
    with start_unisono(ENDLESS + script, tmp_path) as started:
        started.wait_for_steps(3)
        assert psutil.Process(started.worker_pid(1)).ppid() == started.pid

        def tidy() -> bool:
            children = psutil.Process(started.pid).children(recursive=True)
            return all(child.status() != psutil.STATUS_ZOMBIE for child in children)

        started.until(tidy, "the orphan to be buried")
        started.send(signal.SIGTERM)
        started.wait(timeout_s=20, expect=75)
