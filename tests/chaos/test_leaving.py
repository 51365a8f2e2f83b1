# SPDX-License-Identifier: Apache-2.0
"""The machine is wanted back: SIGTERM, SIGUSR1 or SIGUSR2 to a run, or to one of its workers.

A run finishes the step in hand, saves what it has and ends with exit code 75; a worker leaves at the next step boundary
and the others go on. Nothing is lost, and nothing is left behind.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from multiproc.running import run_unisono, start_unisono
from multiproc.scripts import ENDLESS, SMALL
from unisono.core import events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_run_that_is_wanted_back_finishes_its_step_and_saves_even_if_its_workers_ignore_signals(
    number: signal.Signals, tmp_path: Path
) -> None:
    deaf = f"import signal\n\nsignal.signal(signal.{number.name}, signal.SIG_IGN)\nfit(**LONG)\n"
    with start_unisono(ENDLESS + deaf, tmp_path) as started:
        started.wait_for_steps(2)
        started.send(number)
        started.send(number)  # schedulers repeat themselves
        finished = started.wait(timeout_s=10, expect=75)
    assert finished.result is not None
    steps = finished.result["steps"]
    assert f"UNI-4002  asked to leave by {number.name}: stopped after step {steps}, weights saved" in finished.output
    assert finished.output.count("UNI-") == 1, finished.output
    assert [event.exit_code for event in finished.events_of(events.RunFailed)] == [75]
    (tmp_path / "again").write_text(str(steps))
    assert run_unisono(ENDLESS + deaf, tmp_path, workers=1).weights_sha256 == finished.weights_sha256


def test_a_run_that_is_wanted_back_before_it_trains_ends_at_once(tmp_path: Path) -> None:
    with start_unisono(SMALL + "Path('busy').touch()\ntime.sleep(1000)\n", tmp_path) as started:
        started.until((tmp_path / "busy").exists, "the script to begin")
        sent_s = time.monotonic()
        started.send(signal.SIGTERM)
        finished = started.wait(timeout_s=10, expect=75)
    assert time.monotonic() - sent_s < 3
    assert "UNI-4002  asked to leave by SIGTERM" in finished.output


def test_a_step_that_takes_longer_than_the_grace_is_cut_off(tmp_path: Path) -> None:
    stuck = "fit(callbacks=[Every(lambda step: time.sleep(1000 * (step == 3)))])\n"
    with start_unisono(SMALL + stuck, tmp_path, "--grace", "1") as started:
        started.wait_for_steps(3)
        sent_s = time.monotonic()
        started.send(signal.SIGTERM)
        finished = started.wait(timeout_s=10, expect=75)
    assert 1 <= time.monotonic() - sent_s < 4
    assert "asked to leave by SIGTERM, and the step in hand was not finished within 1 s" in finished.output
    assert finished.result is None


SHORT = SMALL + "fit(max_steps=100, callbacks=[Every(lambda step: time.sleep(0.01))])\n"


def test_a_worker_that_is_wanted_back_leaves_and_the_weights_are_the_same(tmp_path: Path) -> None:
    with start_unisono(SHORT, tmp_path, workers="1:2") as started:
        started.wait_for_steps(2)
        os.kill(started.worker_pid(1), signal.SIGTERM)
        finished = started.wait()
    assert finished.result is not None
    assert finished.result["workers"] == 1
    removed = [(event.who, event.how, event.because) for event in finished.events_of(events.WorkerRemoved)]
    assert removed == [(1, "preempted", "asked to leave by SIGTERM")]
    assert finished.events_of(events.WorkerFailed) == []
    assert finished.weights_sha256 == run_unisono(SHORT, tmp_path, workers=1).weights_sha256


def test_a_run_that_cannot_do_without_a_worker_that_is_wanted_back_saves_and_ends(tmp_path: Path) -> None:
    with start_unisono(ENDLESS + "fit(**LONG)\n", tmp_path) as started:
        started.wait_for_steps(2)
        os.kill(started.worker_pid(1), signal.SIGUSR1)
        finished = started.wait(timeout_s=10, expect=75)
    assert finished.result is not None
    assert "UNI-4002  asked to leave by SIGUSR1: stopped after step" in finished.output
    assert finished.output.count("UNI-") == 1, finished.output
