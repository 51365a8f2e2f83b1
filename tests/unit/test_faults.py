# SPDX-License-Identifier: Apache-2.0
"""Fault plans: what is read, what is refused and how, and that each fault happens once, at its place, for real."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core import events
from unisono.core.errors import BadFaultPlan
from unisono.core.faults import KEYS, KINDS, PLACES, WITHIN_A_STEP, Fault, FaultPlan, parse_plan, random_plan, read_plan
from unisono.elastic.fault_points import NO_FAULTS, FaultPoints

PLAN = """
[[fault]]
kind = "kill"
worker = 2
step = 10

[[fault]]
kind = "slow"
worker = 1
step = 5
factor = 3
until = 40

[[fault]]
kind = "freeze"
worker = 2
step = 7
at = "reform"
seconds = 0.5
"""


def test_a_plan_says_what_happens_to_each_worker(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    plan = read_plan(tmp_path / "plan.toml")
    assert plan.of(2) == (Fault("kill", 2, 10, "forward"), Fault("freeze", 2, 7, "reform", seconds=0.5))
    assert plan.of(1) == (Fault("slow", 1, 5, factor=3.0, until=40),)
    assert plan.of(0) == ()


def test_the_plan_and_the_mistake_in_the_document_are_what_they_are_said_to_be() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text()
    (plan,) = re.findall(r"^```toml\n(.*?)^```$", document, re.M | re.S)
    assert [fault.kind for fault in parse_plan(plan, "faults.md").faults] == ["kill", "slow", "freeze"]
    mistaken = plan.replace("[[fault]]", '[[fault]]\nkind = "kill"\nworker = 0\nstep = 1\nfactor = 2\n[[fault]]', 2)
    with pytest.raises(BadFaultPlan) as caught:
        parse_plan("[[fault]]\nkind = 'drop'\nworker = 0\nstep = 1\n" + mistaken, "plan.toml")
    assert f"```text\n{caught.value}\n```" in document
    assert all(f"| `{word}` |" in document for word in (*KINDS, *PLACES, *KEYS))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('kind = "kil"\nworker = 0\nstep = 1', "kind = 'kil' is unknown; did you mean 'kill'?"),
        ('kind = "kill"\nwroker = 0\nstep = 1', "unknown key 'wroker'; did you mean 'worker'?"),
        ('kind = "kill"\nworker = 0\nstep = 1\nat = "foward"', "at = 'foward' is unknown; did you mean 'forward'?"),
        ('kind = "kill"\nworker = 0', "'step' is missing"),
        ('kind = "kill"\nstep = 1', "'worker' is missing"),
        ("worker = 0\nstep = 1", "'kind' is missing"),
        ('kind = "slow"\nworker = 0\nstep = 1', "'factor' is missing"),
        ('kind = "kill"\nworker = 0\nstep = 1\nfactor = 2', "'factor' has no effect on kind = 'kill'"),
        ('kind = "kill"\nworker = 0\nstep = 1\nseconds = 2', "'seconds' has no effect on kind = 'kill'"),
        ('kind = "hang"\nworker = 0\nstep = 1\nuntil = 2', "'until' has no effect on kind = 'hang'"),
        ('kind = "slow"\nworker = 0\nstep = 1\nfactor = 2\nat = "data"', "'at' has no effect on kind = 'slow'"),
        ('kind = "kill"\nworker = 0\nstep = 5\nat = "start"', "step = 5 has no effect at = 'start'"),
        ('kind = "kill"\nworker = -1\nstep = 1', "worker = -1 is not a whole number from 0 on"),
        ('kind = "kill"\nworker = 0\nstep = 0', "step = 0 is not a whole number from 1 on"),
        ('kind = "kill"\nworker = 0\nstep = 1.5', "step = 1.5 is not a whole number"),
        ('kind = "kill"\nworker = true\nstep = 1', "worker = True is not a whole number"),
        ('kind = "slow"\nworker = 0\nstep = 1\nfactor = 0.5', "factor = 0.5 is not a number above 1"),
        ('kind = "slow"\nworker = 0\nstep = 1\nfactor = inf', "factor = inf is not a number above 1"),
        ('kind = "slow"\nworker = 0\nstep = 9\nfactor = 2\nuntil = 8', "until = 8 is before step = 9"),
        ('kind = "hang"\nworker = 0\nstep = 1\nseconds = -3', "seconds = -3 is not a number above 0"),
        ('kind = "hang"\nworker = 0\nstep = 1\nseconds = "long"', "seconds = 'long' is not a number above 0"),
        ('kind = ["kill"]\nworker = 0\nstep = 1', "kind = ['kill'] is unknown"),
    ],
)
def test_a_mistake_in_a_plan_is_refused_with_its_place_and_what_to_do(entry: str, says: str) -> None:
    good = '[[fault]]\nkind = "drop"\nworker = 0\nstep = 3\n'
    with pytest.raises(BadFaultPlan) as caught:
        parse_plan(f"{good}\n[[fault]]\n{entry}\n", "plan.toml")
    assert caught.value.what.startswith("plan.toml: fault 2: ")
    assert says in caught.value.what
    assert caught.value.do
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no fault"),
        ("[[fault", "is not valid TOML"),
        ('[fault]\nkind = "kill"', "'fault' is not a list"),
        ("fault = [3]", "fault 1: is not a table"),
        ('[[faults]]\nkind = "kill"', "unknown key 'faults'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadFaultPlan, match=says.replace("[", r"\[")):
        parse_plan(text, "plan.toml")


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFaultPlan, match=r"cannot read the fault plan .*nowhere.toml: No such file"):
        read_plan(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFaultPlan, match="is not text"):
        read_plan(tmp_path / "bytes.toml")


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(30, 500), st.integers(1, 30))
def test_a_random_plan_is_the_same_for_the_same_seed_and_survives_being_written(
    seed: int, workers: int, steps: int, count: int
) -> None:
    plan = random_plan(seed, workers, steps, count)
    assert plan == random_plan(seed, workers, steps, count)
    assert parse_plan(plan.as_toml(), "written") == plan
    assert len({fault.step for fault in plan.faults}) == count
    ended = [fault.worker for fault in plan.faults if fault.kind != "slow"]
    assert len(ended) == len(set(ended)), "a worker dies once"
    assert all(fault.worker < workers + len(ended) for fault in plan.faults)


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "slow"])
def test_every_kind_at_every_place_survives_being_written(kind: str, at: str) -> None:
    seconds = 1.5 if kind in ("hang", "freeze") else None
    plan = FaultPlan((Fault(kind, 3, 1 if at == "start" else 8, at, seconds=seconds),))
    assert parse_plan(plan.as_toml(), "written") == plan


def reached(fault: Fault, visits: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Where a harmless fault fires on the way along `visits`, a list of (step, place)."""
    done: list[tuple[int, str]] = []
    told: list[events.Event] = []
    points = FaultPoints([fault], told.append, {"drop": lambda: done.append(here)})
    for here in visits:
        points.step = here[0]
        points.reach(here[1])
    fired = [(event.step, event.at) for event in told if isinstance(event, events.FaultFired)]
    assert fired == done
    return fired


VISITS = [(0, "start"), *((step, place) for step in range(1, 30) for place in WITHIN_A_STEP)]
VISITS += [(30, "evaluate"), (31, "reform"), (31, "heal"), (32, "reform"), (32, "heal"), (33, "evaluate")]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("drop", 0, 10, "collective"), [(10, "collective")]),
        (Fault("drop", 0, 10, "reform"), [(31, "reform")]),
        (Fault("drop", 0, 32, "heal"), [(32, "heal")]),
        (Fault("drop", 0, 31, "evaluate"), [(33, "evaluate")]),
        (Fault("drop", 0, at="start"), [(0, "start")]),
        (Fault("drop", 0, 99, "forward"), []),
    ],
)
def test_a_fault_fires_once_at_its_place_in_its_step(fault: Fault, expected: list[tuple[int, str]]) -> None:
    assert reached(fault, [*VISITS, *VISITS]) == expected  # a step that is done again does not fail again


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("drop", 0, 6, "forward"), [(6, "forward")]),
        (Fault("drop", 0, 7, "forward"), [(8, "forward")]),  # nobody gave this worker anything of step 7
        (Fault("drop", 0, 10, "data"), [(10, "data")]),
        (Fault("drop", 0, 5, "collective"), [(5, "collective")]),
        (Fault("drop", 0, 7, "update"), [(12, "update")]),
        (Fault("drop", 0, 11, "forward"), []),
        (Fault("drop", 0, 12, "evaluate"), [(12, "evaluate")]),
        (Fault("drop", 0, 14, "forward"), [(14, "forward")]),
    ],
)
def test_where_workers_meet_once_in_several_steps_a_fault_fires_with_the_next_piece_of_its_round(
    fault: Fault, expected: list[tuple[int, str]]
) -> None:
    done: list[tuple[int, str]] = []
    points = FaultPoints([fault], lambda _: None, {"drop": lambda: done.append((points.step, here))})
    for first, pieces in ((1, (1, 1, 2, 4)), (5, (5, 6, 8, 10)), (13, (14,))):
        points.step = first
        for step in pieces:
            points.go_on_to(step)
            for here in ("data", "forward", "collective"):
                points.reach(here)
        points.go_on_to({1: 4, 5: 12, 13: 14}[first])
        for here in ("collective", "update", "evaluate"):
            points.reach(here)
    assert done == expected


def test_a_slow_worker_takes_its_factor_longer_from_its_first_to_its_last_slow_step() -> None:
    told: list[events.Event] = []
    points = FaultPoints([Fault("slow", 1, 3, factor=5.0, until=4)], told.append, {})
    factors, elapsed = [], []
    for step in range(1, 7):
        points.step = step
        factors.append(points.slow_factor())
        start_s = time.perf_counter()
        points.stretch(0.005)
        elapsed.append(time.perf_counter() - start_s >= 0.02)
        points.reach("forward")
    assert factors == [1.0, 1.0, 5.0, 5.0, 1.0, 1.0]
    assert elapsed[2:4] == [True, True]
    assert [(event.fault, event.step) for event in told if isinstance(event, events.FaultFired)] == [("slow", 3)]


def test_without_a_plan_nothing_happens_anywhere() -> None:
    for place in PLACES:
        NO_FAULTS.reach(place)
    assert NO_FAULTS.slow_factor() == 1.0
    NO_FAULTS.stretch(1e9)


VICTIM = """
import sys
from unisono.core import events
from unisono.core.faults import parse_plan
from unisono.elastic.fault_points import FaultPoints

points = FaultPoints(parse_plan(sys.argv[1], "here").faults, lambda e: print(events.encode(e), flush=True), {})
for points.step in (1, 2, 3):
    points.reach("forward")
print("survived", flush=True)
"""


def victim(entry: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", VICTIM, f"[[fault]]\nworker = 0\nstep = 2\n{entry}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def state_of(pid: int) -> str:
    """One letter: R running, S sleeping, T stopped, Z ended."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_killed_worker_has_said_so_and_is_gone() -> None:
    with victim('kind = "kill"') as process:
        out, _ = process.communicate(timeout=30)
    fired = events.decode(out)
    assert isinstance(fired, events.FaultFired)
    assert (fired.fault, fired.step, fired.at, fired.worker) == ("kill", 2, "forward", 0)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["hang", "freeze"])
def test_a_hang_or_freeze_with_seconds_ends_by_itself(kind: str) -> None:
    with victim(f'kind = "{kind}"\nseconds = 0.3') as process:
        assert process.stdout is not None
        fired = events.decode(process.stdout.readline())
        out, _ = process.communicate(timeout=30)
        ended_s = time.time()
    assert isinstance(fired, events.FaultFired)
    assert ended_s - fired.time_s >= 0.3
    assert out == "survived\n"
    assert process.returncode == 0


def test_a_frozen_worker_is_stopped_and_its_waker_does_not_outlive_it() -> None:
    with victim('kind = "freeze"\nseconds = 1000') as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert state_of(process.pid) == "T"
        (waker,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        pidfd = os.pidfd_open(waker)
        process.kill()
        process.wait(30)
    assert select.select([pidfd], [], [], 30)[0], "the waker lives on"
    os.close(pidfd)
