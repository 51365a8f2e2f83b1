# SPDX-License-Identifier: Apache-2.0
"""Workers die, freeze and come, and so does the coordinator: the run goes on, and ends with the bits of a calm one.

Each test ends with `Watch.check`: the fault happened, every step and every sample once, the losses and the weights of
the calm run, nothing left behind.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from chaos.recovering import SCRIPT, Calm, Watch, begin, calm_run, set_pace
from multiproc.running import run_command
from unisono.core import events
from unisono.core.faults import Fault

FAST_S = 0.005  # for a microbatch: no time to lose
LATE_S = 1.5  # in which the others finish some steps
LATER = 100  # a step that is not reached before the test says so


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return calm_run(SCRIPT, tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize("place", ["forward", "collective"])
def test_each_of_four_is_killed_in_turn(place: str, calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("kill", worker, 4 + worker, place) for worker in range(3)]
    faults.append(Fault("kill", 3, LATER, place))
    with begin(SCRIPT, tmp_path, "--max-restarts", "1", faults=faults) as run:
        run.until_members(3, 4)
        set_pace(tmp_path, FAST_S)
        run.until_fired(4)
        run.check(run.hurry(), calm, faults)
        assert run.members == [4]


def test_workers_are_killed_while_the_others_re_form(calm: Calm, tmp_path: Path) -> None:
    """Worker 1 when worker 3 has died; worker 0 when others have come; worker 2 when one of those has died."""
    faults = [
        Fault("kill", 3, 4),
        Fault("kill", 1, 4, "reform"),
        Fault("kill", 0, 5, "reform"),
        Fault("kill", 2, LATER, "reform"),
        *(Fault("hang", worker, 1, "start", seconds=LATE_S) for worker in (4, 5)),
    ]
    with begin(SCRIPT, tmp_path, "--max-restarts", "2", faults=faults) as run:
        run.until_members(0, 2)
        run.until_members(2, 4, 5)
        set_pace(tmp_path, FAST_S)
        run.until_step(LATER)
        run.kill(4)
        run.until_members(5)
        run.check(run.hurry(), calm, faults)


def test_workers_are_killed_while_a_joiner_is_healed(calm: Calm, tmp_path: Path) -> None:
    """First the joiner, then, with the next one, a donor."""
    faults = [
        Fault("kill", 3, 4),
        Fault("kill", 4, 4, "heal"),
        Fault("kill", 0, 12, "heal"),
        Fault("hang", 5, 1, "start", seconds=LATE_S),
    ]
    with begin(SCRIPT, tmp_path, "--max-restarts", "2", faults=faults) as run:
        run.until_members(1, 2, 5)
        run.check(run.hurry(), calm, faults)


def test_a_donor_that_falls_silent_while_it_gives_the_state_is_put_out(calm: Calm, tmp_path: Path) -> None:
    """Its connections stay open, and everybody waits: those who are through, the joiner, and itself."""
    faults = [Fault("kill", 3, 4), Fault("drop", 1, 5, "heal")]
    with begin(SCRIPT, tmp_path, "--max-restarts", "1", "--hang-after", "4", faults=faults) as run:
        run.until(lambda: run.members and 1 not in run.members, "the others to go on")
        run.check(run.hurry(), calm, faults)
        (silent,) = [event for event in run.of(events.WorkerRemoved) if event.who == 1]
        assert "nothing comes from worker 1" in silent.because


@pytest.mark.parametrize("dying", [(0, 2), (0, 1, 3)], ids=["two", "all but one"])
def test_several_are_killed_at_once(dying: tuple[int, ...], calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("kill", worker, 6, "collective") for worker in dying]
    with begin(SCRIPT, tmp_path, "--max-restarts", "0", faults=faults) as run:
        run.until_members(*(worker for worker in range(4) if worker not in dying))
        run.check(run.hurry(), calm, faults)


def test_stopped_workers_are_left_behind_and_go_when_they_wake(calm: Calm, tmp_path: Path) -> None:
    """Worker 1 is woken before anybody gives it up, worker 2 when the others have gone on, worker 0 never."""
    faults = [Fault("freeze", 1, 4, "collective", seconds=0.2)]
    with begin(SCRIPT, tmp_path, "--max-restarts", "0", faults=faults) as run:
        run.until_step(6)
        run.signal(2, signal.SIGSTOP)
        run.until(lambda: 2 not in run.members, "the others to go on")
        run.signal(2, signal.SIGCONT)
        left = run.until_gone(2)
        assert (left.exit_code, left.expected) == (75, True)
        run.signal(0, signal.SIGSTOP)
        run.until(lambda: 0 not in run.members, "the others to go on")
        run.check(run.hurry(30), calm, faults)
        assert {event.who for event in run.of(events.WorkerRemoved) if event.how == "frozen"} >= {0, 2}


def test_the_coordinator_is_killed_and_nobody_waits_for_it(calm: Calm, tmp_path: Path) -> None:
    """Alone; together with a worker; and once more while that one's place is being filled."""
    with begin(SCRIPT, tmp_path, "--max-restarts", "1") as run:
        run.until_step(4)
        run.kill_coordinator()
        run.until_step(run.step + 4)
        assert len(run.of(events.MembershipChanged)) == 1
        run.kill_coordinator()
        run.kill(1)
        run.until_members(0, 2, 3)
        run.until(lambda: 4 in run.pids, "worker 4 to start")
        run.kill_coordinator()
        run.until_members(0, 2, 3, 4)
        run.check(run.hurry(), calm)
        assert [event.number for event in run.of(events.CoordinatorStarted)] == [1, 2, 3, 4]


def test_workers_are_added_while_others_die(calm: Calm, tmp_path: Path) -> None:
    """One of three dies, two are added. Of those, one dies as it starts; and a donor while it gives the other state."""
    faults = [Fault("kill", 0, 4, "heal")]
    with begin(SCRIPT, tmp_path, "--local", "3", "--max-restarts", "0", faults=faults) as run:
        run.until_members(0, 1, 2)
        run.kill(1)
        run.until_members(0, 2)
        run.until_step(faults[0].step)  # whoever is added now copies the state where the donor's fault lies
        assert "from 2 to 4 workers" in run_command(tmp_path, "scale", "chaos", "4").output
        run.kill(3)
        run.until_members(2, 4)
        run.check(run.hurry(), calm, faults)


@pytest.mark.timeout(240)
def test_sixty_faults_in_one_run(calm: Calm, tmp_path: Path) -> None:
    """Every kind in the first workers, as planned; then a seeded hand goes for whoever is there."""
    faults = [
        Fault("slow", 0, 2, factor=2.0, until=9),
        Fault("slow", 1, 3, factor=1.5, until=30),
        Fault("freeze", 1, 4, "collective", seconds=0.2),
        Fault("freeze", 3, 5, "update", seconds=0.3),
        Fault("hang", 2, 6, "data"),
        Fault("drop", 3, 7, "collective"),
        Fault("kill", 0, 8, "collective"),
    ]
    with begin(SCRIPT, tmp_path, "--hang-after", "4", faults=faults, pace_s=0.02) as run:
        run.until_fired(len(faults))
        set_pace(tmp_path, 0.15)
        deeds = ["kill"] * 12 + ["nap"] * 33 + ["sleep"] * 2 + ["coordinator"] * 6
        rng = random.Random(60)
        rng.shuffle(deeds)
        for deed in deeds:
            run.until_step(run.step + rng.randint(0, 2))
            harm(run, deed, rng)
        assert len(faults) + len(deeds) == 60
        run.check(run.hurry(), calm, faults)


def harm(run: Watch, deed: str, rng: random.Random) -> None:
    """To a member of the generation in hand, but never to the last that holds the state."""
    if deed == "coordinator":
        run.kill_coordinator()
        return

    def company() -> list[int] | None:
        there = [worker for worker in run.settled if run.exit_of(worker) is None and worker not in run.killed]
        return there if len(there) > 1 else None

    worker = rng.choice(run.until(company, "two who hold the state"))
    if deed == "kill":
        run.kill(worker)
        return
    run.signal(worker, signal.SIGSTOP)
    if deed == "nap":
        time.sleep(rng.uniform(0.02, 0.4))
    else:
        run.until(lambda: worker not in run.members, "the others to go on")
    run.signal(worker, signal.SIGCONT)
