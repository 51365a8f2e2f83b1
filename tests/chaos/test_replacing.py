# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, in whatever way, is replaced, and the weights are those of a run in which nothing happened.

Single deaths of each kind, with the default options. How the same deaths read when nobody is replaced is in
test_failing_fast.py; many deaths at every place of a step are in the other files of this folder.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from multiproc.running import Finished, run_unisono
from multiproc.scripts import SMALL
from unisono.core import events


@functools.cache
def undisturbed() -> str:
    """The weights after nine steps without any fault."""
    with tempfile.TemporaryDirectory() as folder:
        return run_unisono(SMALL + "fit(max_steps=9)\n", Path(folder), workers=1).weights_sha256


@pytest.mark.parametrize(
    ("fault", "because"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("os._exit(0)", "exit code 0"),
        ("raise MemoryError('no more')", "MemoryError: no more"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit 0", "MemoryError"],
)
def test_a_worker_that_dies_is_replaced_and_the_weights_are_the_same(fault: str, because: str, tmp_path: Path) -> None:
    script = f"""
import ctypes
import signal


def fail(step):
    if WORKER == 1 and step == 3:
        {fault}


fit(callbacks=[Every(fail)], max_steps=9)
"""
    survived = run_unisono(SMALL + script, tmp_path)
    assert_replaced(survived, because)
    assert survived.weights_sha256 == undisturbed()


def assert_replaced(finished: Finished, because: str) -> None:
    """Worker 1 died, worker 2 took its place, every step happened once, and nobody was blamed."""
    assert finished.result is not None
    assert finished.result["workers"] == 2
    (removed,) = finished.events_of(events.WorkerRemoved)
    assert (removed.who, removed.how) == (1, "died")
    assert because in removed.because
    replaced = {event.worker: event.replaces for event in finished.events_of(events.WorkerStarted)}
    assert replaced == {0: None, 1: None, 2: 1}
    assert [event.members for event in finished.events_of(events.MembershipChanged)][-1] == [0, 2]
    steps = [event.step for event in finished.events_of(events.StepFinished)]
    assert steps == list(range(1, finished.result["steps"] + 1))
    assert "UNI-" not in finished.output, finished.output


KILL_LOADER = """
import multiprocessing
import signal


def fail(step):
    if WORKER == 1 and step == 3:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


fit(data=unisono.Data(DATA, loader_processes=1), callbacks=[Every(fail)], max_steps=9)
"""


def test_a_worker_whose_loader_process_was_killed_is_replaced_and_the_weights_are_the_same(tmp_path: Path) -> None:
    survived = run_unisono(SMALL + KILL_LOADER, tmp_path)
    assert_replaced(survived, "a loader process died")
    assert survived.weights_sha256 == undisturbed()
