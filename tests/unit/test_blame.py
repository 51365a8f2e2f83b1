# SPDX-License-Identifier: Apache-2.0
"""Who is to blame for a failed run, as a table: what the workers reported, how they ended, what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unisono.control.blame import Death, first_failure, preemption, silent_death, without_result
from unisono.core.errors import (
    NonFiniteLoss,
    PeerLost,
    ReplicasDisagree,
    ScriptFailed,
    UnisonoError,
    WorkerHung,
    WorkerLost,
)
from unisono.core.events import WorkerFailed
from unisono.core.run_dir import RunDir

RUN = RunDir(Path("runs/x"))
OURS = True


def failed(worker: int, time_s: float, error: UnisonoError, traceback: str = "") -> WorkerFailed:
    return WorkerFailed(worker=worker, time_s=time_s, failure=error.as_dict(), traceback=traceback)


def died(worker: int, time_s: float, code: int, expected: bool = False) -> Death:
    return Death(worker, code, time_s, expected)


def exception(worker: int, time_s: float) -> WorkerFailed:
    return failed(worker, time_s, ScriptFailed("ValueError: x", where="train.py:3"), f"Traceback of worker {worker}")


def broken(worker: int, time_s: float) -> WorkerFailed:
    return failed(worker, time_s, PeerLost("the connection to the worker at rank 1 broke"), "Traceback of ours")


@pytest.mark.parametrize(
    ("failures", "deaths", "shown"),
    [
        pytest.param([], [], None, id="nothing happened"),
        pytest.param([], [died(0, 1, 0), died(1, 1, 0)], None, id="all ended well"),
        pytest.param([], [died(0, 1, -15, OURS), died(1, 1, 130, OURS)], None, id="only those that we stopped"),
        pytest.param([exception(1, 5)], [], ("UNI-1101", "worker 1 on h, train.py:3"), id="an exception"),
        pytest.param(
            [exception(1, 5), exception(0, 4)],
            [died(0, 6, 10), died(1, 6, 10)],
            ("UNI-1101", "worker 0 on h, train.py:3"),
            id="the first exception by time, not by arrival",
        ),
        pytest.param(
            [broken(0, 4), exception(1, 5)],
            [],
            ("UNI-1101", "worker 1 on h, train.py:3"),
            id="an exception beats the connection that broke before it was told",
        ),
        pytest.param([], [died(2, 1, -9)], ("UNI-2001", "worker 2 on h was ended by SIGKILL"), id="killed"),
        pytest.param(
            [broken(0, 1), broken(1, 1)],
            [died(2, 2, -9), died(0, 2, 20), died(1, 2, 20)],
            ("UNI-2001", "worker 2 on h was ended by SIGKILL"),
            id="killed beats the connections that broke with it",
        ),
        pytest.param(
            [],
            [died(1, 3, -11), died(0, 2, -6), died(2, 1, -9, OURS)],
            ("UNI-2001", "worker 0 on h was ended by SIGABRT"),
            id="the first death by time that was not our doing",
        ),
        pytest.param(
            [exception(0, 5)],
            [died(1, 3, -9), died(0, 6, 10)],
            ("UNI-2001", "worker 1 on h was ended by SIGKILL"),
            id="a death before the first exception",
        ),
        pytest.param(
            [exception(0, 3)],
            [died(0, 4, 10), died(1, 5, -9)],
            ("UNI-1101", "worker 0 on h, train.py:3"),
            id="an exception before the first silent death",
        ),
        pytest.param(
            [broken(0, 2), broken(1, 3)],
            [died(0, 4, 20), died(1, 4, 20)],
            ("UNI-2002", "worker 0 on h"),
            id="nothing but broken connections",
        ),
    ],
)
def test_the_first_cause_by_time_is_shown(
    failures: list[WorkerFailed], deaths: list[Death], shown: tuple[str, str] | None
) -> None:
    error, _ = first_failure(failures, deaths, "h", RUN)
    if shown is None:
        assert error is None
        return
    code, text = shown
    assert error is not None
    assert error.code == code
    assert text in (error.where or error.what)


def result(stopped_early: str) -> dict[str, Any]:
    return {"steps": 7, "stopped_early": stopped_early}


@pytest.mark.parametrize(
    ("number", "ended_with", "what"),
    [
        pytest.param(0, None, None, id="nobody was asked, nothing came of it"),
        pytest.param(0, result(""), None, id="a training that came to its end"),
        pytest.param(0, result("the script asked to stop"), None, id="its own wish"),
        pytest.param(0, result("stopped by unisono stop"), None, id="the operator's wish"),
        pytest.param(15, result(""), None, id="asked when it was done"),
        pytest.param(
            15,
            result("asked to leave by SIGTERM"),
            "asked to leave by SIGTERM: stopped after step 7, weights saved",
            id="asked, and stopped for that",
        ),
        pytest.param(
            10,
            result("the run was asked to stop"),
            "asked to leave by SIGUSR1: stopped after step 7, weights saved",
            id="asked, and the first worker had not heard by what",
        ),
        pytest.param(
            0,
            result("asked to leave by SIGUSR2"),
            "asked to leave by SIGUSR2: stopped after step 7, weights saved",
            id="a worker was asked that the run needed",
        ),
        pytest.param(
            0,
            result("box was asked to leave by SIGTERM"),
            "box was asked to leave by SIGTERM: stopped after step 7, weights saved",
            id="a machine was asked that the run needed",
        ),
        pytest.param(
            15,
            None,
            "asked to leave by SIGTERM, and the step in hand was not finished within 2.5 s",
            id="asked, and too slow",
        ),
    ],
)
def test_a_run_that_was_asked_to_leave_says_so_unless_it_was_done(
    number: int, ended_with: dict[str, Any] | None, what: str | None
) -> None:
    error = preemption(number, ended_with, 2.5)
    assert (error.what if error else None) == what
    assert error is None or (error.code, error.exit_code) == ("UNI-4002", 75)


@pytest.mark.parametrize(
    ("deaths", "what"),
    [
        pytest.param([], "train.py ended without a result", id="nobody was even started"),
        pytest.param([died(0, 1, 0), died(1, 1, 0)], "train.py ended without a result", id="everywhere"),
        pytest.param(
            [died(1, 1, 0, OURS), died(0, 2, -9, OURS)],
            "train.py ended on worker 1 before the training was finished",
            id="on one of them",
        ),
    ],
)
def test_a_script_that_ends_too_early_says_on_whom(deaths: list[Death], what: str) -> None:
    error = without_result("train.py", deaths, "box")
    assert (error.code, error.what) == ("UNI-1103", what)


def test_the_users_own_traceback_goes_with_their_exception() -> None:
    _, trace = first_failure([broken(0, 1), exception(1, 2)], [], "h", RUN)
    assert trace == "Traceback of worker 1"


def test_a_broken_connection_shows_no_traceback_of_ours() -> None:
    assert first_failure([broken(0, 1)], [], "h", RUN)[1] == ""


def test_what_a_worker_said_is_kept_and_its_name_added() -> None:
    said = NonFiniteLoss("the loss is nan at step 3", cause="a high learning rate", do="lower it")
    error, _ = first_failure([failed(2, 1.0, said)], [], "box", RUN)
    assert isinstance(error, NonFiniteLoss)
    assert (error.what, error.where, error.cause, error.do) == (said.what, "worker 2 on box", said.cause, said.do)


@pytest.mark.parametrize(
    ("code", "what", "cause"),
    [
        (-9, "was ended by SIGKILL", "memory"),
        (-11, "was ended by SIGSEGV", "native code"),
        (-4, "was ended by SIGILL", "instruction"),
        (-6, "was ended by SIGABRT", "native code"),
        (-7, "was ended by SIGBUS", "shared memory"),
        (-10, "was ended by SIGUSR1", "a signal from outside"),
        (-64, "was ended by SIGRTMAX", "a signal from outside"),
        (3, "ended with exit code 3", "ended the process"),
    ],
)
def test_a_silent_death_is_explained_and_points_to_the_log(code: int, what: str, cause: str) -> None:
    error, _ = first_failure([], [died(4, 1.0, code)], "box", RUN)
    assert isinstance(error, WorkerLost)
    assert f"worker 4 on box {what}" in error.what
    assert cause in error.cause
    assert "runs/x/logs/worker-4.log" in error.do


def test_the_step_in_hand_is_named_once() -> None:
    plain = WorkerFailed(worker=1, failure=ScriptFailed("ValueError: x", where="train.py:3").as_dict(), step=6)
    error, _ = first_failure([plain], [], "box", RUN)
    assert error is not None
    assert error.where == "worker 1 on box, step 7, train.py:3"
    named = WorkerFailed(worker=1, failure=NonFiniteLoss("the loss is nan at step 7").as_dict(), step=6)
    error, _ = first_failure([named], [], "box", RUN)
    assert error is not None
    assert error.where == "worker 1 on box"


def test_of_several_who_say_the_same_the_one_it_is_about_is_heard() -> None:
    said = [failed(worker, float(worker), NonFiniteLoss("the loss is nan on worker 2")) for worker in (0, 1, 2, 3)]
    error, _ = first_failure(said, [], "box", RUN)
    assert error is not None
    assert error.where == "worker 2 on box"


def test_of_several_who_blame_each_other_the_most_blamed_is_named() -> None:
    blamed = {0: 2, 1: 2, 2: 0, 3: 2}
    said = [
        failed(worker, 1.0 - worker / 10, ReplicasDisagree(f"worker {other} sent 8 bytes where 4 were expected"))
        for worker, other in blamed.items()
    ]
    error, _ = first_failure(said, [], "box", RUN)
    assert error is not None
    assert error.what.startswith("worker 2 sent 8 bytes")


@pytest.mark.parametrize(
    ("known", "above"),
    [
        (
            WorkerLost("worker 4 on box was killed by the kernel: out of memory (step 3)", where="train.py:9"),
            "… the end",
        ),
        (WorkerHung("worker 4 on box never reached: adding up the gradients (step 3)"), ""),
    ],
    ids=["its last words are worth seeing", "we killed it: they are not"],
)
def test_what_is_known_of_a_death_beats_its_exit_code(known: UnisonoError, above: str) -> None:
    death = Death(4, -9, 1.0, False, last_words="… the end of its output:\nline")
    error, trace = first_failure([], [death], "box", RUN, {4: known.as_dict(), 5: {"what": "another's"}})
    assert error is not None
    assert (error.code, error.what, error.where) == (known.code, known.what, known.where)
    assert trace.startswith(above)
    assert bool(trace) == bool(above)


def test_a_kill_for_want_of_memory_is_told_from_other_kills() -> None:
    error = silent_death("worker 1 on box", -9, "worker-1.log", step=4, where="last seen in x", out_of_memory=True)
    assert error.what == "worker 1 on box was killed by the kernel: out of memory (step 5)"
    assert error.where == "last seen in x"
    assert "limit" in error.do
    assert "(step 5)" in silent_death("worker 1 on box", 3, "worker-1.log", step=4).what
