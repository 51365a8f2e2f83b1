# SPDX-License-Identifier: Apache-2.0
"""Who is to blame for a failed run, as a table: what the workers reported, how they ended, what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.control.blame import Death, first_failure
from unisono.core.errors import NonFiniteLoss, PeerLost, ScriptFailed, UnisonoError, WorkerLost
from unisono.core.events import WorkerFailed
from unisono.core.run_dir import RunDir

RUN = RunDir(Path("runs/x"))
OURS = True


def failed(worker: int, time_s: float, error: UnisonoError, traceback: str = "") -> WorkerFailed:
    return WorkerFailed(worker=worker, time_s=time_s, failure=error.as_dict(), traceback=traceback)


def died(worker: int, time_s: float, code: int, stopped_by_us: bool = False) -> Death:
    return Death(worker, code, time_s, stopped_by_us)


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
