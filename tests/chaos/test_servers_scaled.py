# SPDX-License-Identifier: Apache-2.0
"""Parameter servers that are added and taken away while the run trains: slices and optimizer state move along."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.recovering import Calm, Watch, begin, calm_run, set_pace
from chaos.test_servers_chaos import MOMENTUM, NEVER, SERVERS, check_loose, script, serving
from multiproc.running import run_command
from unisono.core import events

SLOWLY_S = 0.15  # a microbatch
SAMPLES = 640  # 40 steps an epoch


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """On one worker, by all-reduce."""
    return calm_run(MOMENTUM, tmp_path_factory.mktemp("calm"))


def scale(run: Watch, *asked: str, expect: int = 0) -> str:
    """The run goes on slowly meanwhile, and until told otherwise: on a busy machine a command takes seconds."""
    set_pace(run.it.folder, SLOWLY_S)
    return run_command(run.it.folder, "scale", "chaos", *asked, expect=expect).output


def servers_of(run: Watch) -> list[int]:
    """How many served, generation by generation."""
    changes = run.of(events.MembershipChanged)
    return [sum(first == last for first, last in change.ranges) for change in changes]


def test_one_server_becomes_three_and_one_again_and_the_bits_are_those_of_all_reduce(
    calm: Calm, tmp_path: Path
) -> None:
    """Nothing is saved, so a slice that got lost would end the run. The coordinator dies before they are there."""
    with begin(MOMENTUM, tmp_path, *SERVERS, *NEVER, workers="1:2") as run:
        run.until_step(3)
        assert "from 1 to 3 servers" in scale(run, "--servers", "3")
        run.kill_coordinator()
        run.until_many(5)
        assert len(serving(run)) == 3
        run.until_step(run.step + 2)
        assert "from 2 to 3 workers and from 3 to 1 servers" in scale(run, "3", "--servers", "1")
        run.until_many(4)
        assert serving(run) == [2]
        run.check(run.hurry(), calm)
        assert [servers_of(run)[0], max(servers_of(run)), servers_of(run)[-1]] == [1, 3, 1]
        assert [event.how for event in run.of(events.WorkerRemoved)] == ["left"]


def test_a_loose_run_with_other_servers_loses_no_update(tmp_path: Path) -> None:
    asked = ("--staleness", "inf", *NEVER)
    with begin(script(momentum=0.9, samples=SAMPLES), tmp_path, *SERVERS, *asked, workers="1:2", pace_s=0.02) as run:
        run.until_step(1)
        scale(run, "--servers", "3")
        run.until_many(5)
        assert len(serving(run)) == 3
        set_pace(tmp_path, 0.02)
        run.until_step(run.step + 1)
        scale(run, "--servers", "1")
        set_pace(tmp_path, 0.02)
        run.until_many(3)
        assert serving(run) == [2]
        check_loose(run, run.hurry(), SAMPLES)
        assert "none lost" in run_command(tmp_path, "show", "chaos").output


def test_a_number_of_servers_that_cannot_be_is_refused_with_the_cure(tmp_path: Path) -> None:
    with begin(MOMENTUM, tmp_path, *SERVERS, *NEVER, "--servers", "2", "--copies", "2", workers="1:2") as run:
        run.until_step(1)
        refused = scale(run, "--servers", "1", expect=2)
        assert "2 copies of each slice" in refused
        assert "ask for 2 or more" in refused
        assert "scale to how many?" in scale(run, expect=2)
        run.hurry()
        assert set(servers_of(run)) == {2}
