# SPDX-License-Identifier: Apache-2.0
"""Runs with staleness in which weights are pulled or pushed, as codes or as they are, and workers and servers die.

`tally` counts in the weights how often each sample was learnt from (see test_servers_chaos.py). Half precision says its
counts exactly, so an update that was lost or made twice shows through the codes.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from chaos.recovering import Watch, begin
from chaos.test_servers_chaos import EPOCHS, MOMENTUM, NEVER, SAVING, SERVERS, STEPS, check_loose, check_nothing_failed
from unisono.core import events
from unisono.core.faults import Fault

WIDE = MOMENTUM.replace("nn.Linear(8, 16)", "nn.Linear(8, 400)").replace("nn.Linear(16, 4)", "nn.Linear(400, 4)")
BUCKETS = MOMENTUM.replace("nn.Linear(8, 16)", "nn.Linear(8, 40000)").replace("nn.Linear(16, 4)", "nn.Linear(40000, 4)")
FRESH = pytest.mark.parametrize("fresh", ["pull", "push"])


def check_bound(run: Watch, bound: int) -> None:
    told = run.of(events.Staleness)
    assert told
    assert max(int(lead) for event in told for lead in event.leads) <= bound


@FRESH
@pytest.mark.parametrize("compress", ["none", "fp16"])
def test_no_update_is_lost_when_workers_are_killed_and_one_is_slow(fresh: str, compress: str, tmp_path: Path) -> None:
    faults = [Fault("slow", 0, 1, factor=10.0, until=20), Fault("kill", 1, 1), Fault("kill", 4, 21)]
    asked = ("--staleness", "2", "--fresh", fresh, "--compress", compress, *NEVER)
    with begin(WIDE, tmp_path, *SERVERS, *asked, faults=faults, workers="1:3", pace_s=0.02) as run:
        run.until_fired(3)
        check_loose(run, run.hurry())
        check_bound(run, 2)


@FRESH
def test_no_update_is_lost_when_workers_die_between_the_buckets_of_a_push(fresh: str, tmp_path: Path) -> None:
    """In the middle of rounds, with a first bucket on its way; steps of a round that they get nothing of count too."""
    faults = [Fault("kill", 1, 3, "collective"), Fault("kill", 0, 23, "collective"), Fault("kill", 4, 44, "data")]
    asked = ("--staleness", "2", "--fresh", fresh, *NEVER)
    with begin(BUCKETS, tmp_path, *SERVERS, *asked, faults=faults, workers="1:3", pace_s=0.02) as run:
        run.until_fired(3)
        check_loose(run, run.hurry())
        check_bound(run, 2)
        fired = {event.worker: event.step for event in run.of(events.FaultFired)}
        assert fired.keys() == {1, 0, 4}
        assert 3 <= fired[1] <= 16, fired
        assert 23 <= fired[0] <= 36, fired
        assert 44 <= fired[4] <= 56, fired


@FRESH
def test_with_two_copies_no_update_is_lost_when_a_server_is_killed(fresh: str, tmp_path: Path) -> None:
    """And nobody goes back. The server computes nothing, so it meets its fault where the round ends."""
    asked = ("--staleness", "2", "--fresh", fresh, "--compress", "fp16", "--servers", "2", "--copies", "2", *NEVER)
    faults = [Fault("kill", 3, 22, "collective")]
    with begin(WIDE, tmp_path, *SERVERS, *asked, faults=faults, workers="1:2", pace_s=0.02) as run:
        run.until_fired(1)
        run.until_many(4, without=[3])
        check_loose(run, run.hurry())
        check_bound(run, 2)
        assert not [event for event in run.of(events.Notice) if event.code == "slices-lost"]


def test_with_two_copies_no_update_is_lost_when_a_worker_that_serves_is_killed(tmp_path: Path) -> None:
    asked = ("--staleness", "2", "--servers", "0", "--copies", "2", *NEVER)
    with begin(MOMENTUM, tmp_path, *SERVERS, *asked, workers="2:3", pace_s=0.02) as run:
        run.until_step(16)
        run.kill(1)
        run.until_many(3, without=[1])
        check_loose(run, run.hurry())
    assert not run.of(events.RolledBack)
    assert not [event for event in run.of(events.Notice) if event.code == "slices-lost"]


@FRESH
def test_with_one_copy_it_goes_back_to_a_checkpoint(fresh: str, tmp_path: Path) -> None:
    asked = ("--staleness", "inf", "--fresh", fresh, "--compress", "fp16", *SAVING)
    with begin(WIDE, tmp_path, *SERVERS, *asked, workers="1:2", pace_s=0.02) as run:
        run.until_step(20)
        run.kill(2)
        run.until_many(3, without=[2])
        check_loose(run, run.hurry())
        assert [event.code for event in run.of(events.Notice) if event.code == "slices-lost"]


def test_with_codes_that_say_little_the_run_goes_on_without_a_worker_and_the_coordinator(tmp_path: Path) -> None:
    asked = ("--staleness", "inf", "--fresh", "push", "--compress", "topk:0.05", *SAVING)
    with begin(WIDE, tmp_path, *SERVERS, *asked, workers="1:3", pace_s=0.02) as run:
        run.until_step(16)
        run.kill(0)
        run.kill_coordinator()
        run.until_many(4, without=[0])
        finished = run.hurry()
    check_nothing_failed(run)
    assert finished.result is not None
    assert (finished.result["steps"], finished.result["samples"]) == (STEPS, 320 * EPOCHS)
    assert all(math.isfinite(step.loss) for step in run.of(events.StepFinished))
