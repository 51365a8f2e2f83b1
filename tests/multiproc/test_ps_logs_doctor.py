# SPDX-License-Identifier: Apache-2.0
"""``unisono ps``, ``logs`` and ``doctor`` as a user types them, beside real runs."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiproc.running import Started, run_command, run_python, run_unisono, start_unisono
from multiproc.scripts import SMALL

ENDLESS = SMALL + "fit(max_steps=100_000, callbacks=[Every(lambda step: time.sleep(0.02))])\n"
# Speaks after the first step, and then again each time a file appears; ends after the second.
TALKING = (
    SMALL
    + """
def talk(step):
    if step == 1:
        print(f"worker {WORKER} is here", flush=True)
    if WORKER == 0 and step == 2:
        while not Path("go-on").exists():
            time.sleep(0.02)
    if step == 3:
        print("unfinished", end="")


fit(callbacks=[Every(talk)])
"""
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "unisono.cli", *arguments]


def row(output: str, name: str) -> list[str]:
    """The cells of a run's line."""
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    return line.split()


def test_ps_shows_what_runs_now_and_with_a_what_has_ended(tmp_path: Path) -> None:
    assert "no run is running under runs/" in run_command(tmp_path, "ps").output
    run_unisono(SMALL + "fit()\n", tmp_path, "--name", "done")
    run_unisono(SMALL + "raise ValueError('no')\n", tmp_path, "--name", "broken", expect=10)
    with start_unisono(ENDLESS, tmp_path, "--name", "now") as run:
        run.wait_for_steps(5)
        output = run_command(tmp_path, "ps").output
        assert "done" not in output
        _, state, workers, step, rate, *_ = row(output, "now")
        assert (state, workers) == ("running", "2")
        done, total = step.split("/")
        assert int(done.replace(",", "")) >= 5
        assert total == "100,000"
        assert float(rate.replace(",", "")) > 0
        everything = run_command(tmp_path, "ps", "-a").output
        assert everything.splitlines()[1].startswith("now"), "what runs comes first"
        assert row(everything, "done")[1:4] == ["finished", "2", "4/4"]
        assert row(everything, "broken")[1] == "failed"
        assert "UNI-1101 ValueError: no" in everything
        run.send(signal.SIGKILL)
        run.process.wait(10)
    assert "no run is running under runs/; unisono ps -a lists what has ended (3)" in run_command(tmp_path, "ps").output
    assert row(run_command(tmp_path, "ps", "-a").output, "now")[1] == "gone"


def test_ps_knows_the_runs_beside_the_directory_that_the_environment_names(tmp_path: Path) -> None:
    run_unisono(SMALL + "fit()\n", tmp_path, "--run-dir", "elsewhere/one", workers=1)
    assert "there is no run under runs/" in run_command(tmp_path, "ps", "-a").output
    with Started(command("ps", "-a"), tmp_path, {"UNISONO_RUN_DIR": "elsewhere/two"}) as listing:
        assert row(listing.wait().output, "one")[1] == "finished"


def test_ps_stays_cheap_beside_many_runs_and_huge_ones(tmp_path: Path) -> None:
    done = run_unisono(SMALL + "fit()\n", tmp_path, "--name", "first", workers=1)
    assert done.run_dir is not None
    lines = (done.run_dir / "events.jsonl").read_bytes()
    for number in range(200):
        copy = tmp_path / "runs" / f"copy-{number}"
        shutil.copytree(done.run_dir, copy)
        with (copy / "events.jsonl").open("r+b") as file:
            file.seek(1 << 30)  # a gigabyte each, nearly all of it a hole
            file.write(b"\n" + lines)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = run_command(tmp_path, "ps", "-a", timeout_s=20).output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(output.splitlines()) == 202
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_logs_of_several_workers_carry_their_numbers_and_of_one_nothing(tmp_path: Path) -> None:
    (tmp_path / "go-on").write_text("")
    run_unisono(TALKING, tmp_path, "--name", "x")
    both = run_command(tmp_path, "logs", "x").output.splitlines()
    assert sorted(both) == [
        "worker 0 | unfinished",
        "worker 0 | worker 0 is here",
        "worker 1 | unfinished",
        "worker 1 | worker 1 is here",
    ]
    assert both == sorted(both, key=lambda line: line[:8]), "one worker after the other"
    assert run_command(tmp_path, "logs", "runs/x", "--worker", "1").output == "worker 1 is here\nunfinished"


def test_logs_can_be_followed_until_the_run_has_ended(tmp_path: Path) -> None:
    with start_unisono(TALKING, tmp_path, "--name", "x") as run:
        run.until(lambda: run.run_dir, "the run to begin")
        with Started(command("logs", "x", "-f"), tmp_path, None) as follower:
            # Its first words, while the run still waits for us.
            follower.until(lambda: "worker 0 | worker 0 is here\n" in follower.output, "the first line")
            assert "unfinished" not in follower.output
            (tmp_path / "go-on").write_text("")
            output = follower.wait(60).output
        run.wait()
    for worker in (0, 1):
        assert output.count(f"worker {worker} | worker {worker} is here\n") == 1
        assert output.count(f"worker {worker} | unfinished\n") == 1
    assert output.endswith("run x finished\n")


def test_following_a_run_that_fails_ends_with_its_failure(tmp_path: Path) -> None:
    run_unisono(SMALL + "raise ValueError('no')\n", tmp_path, "--name", "x", workers=1, expect=10)
    output = run_command(tmp_path, "logs", "x", "-f").output
    assert "ValueError: no" in output
    assert output.endswith("run x failed: UNI-1101 ValueError: no\n")


def test_ctrl_c_ends_following_without_a_word_and_leaves_the_run_alone(tmp_path: Path) -> None:
    with start_unisono(TALKING, tmp_path, "--name", "x") as run:
        run.until(lambda: run.run_dir, "the run to begin")
        with Started(command("logs", "x", "-f", "--worker", "0"), tmp_path, None) as follower:
            follower.until(lambda: "worker 0 is here\n" in follower.output, "the first line")
            follower.send(signal.SIGINT)
            assert follower.wait(10).output == "worker 0 is here\n"
        (tmp_path / "go-on").write_text("")
        run.wait()


def test_a_reader_that_has_seen_enough_of_the_logs_causes_no_traceback(tmp_path: Path) -> None:
    run_unisono("print('a line\\n' * 100_000)\n" + SMALL + "fit()\n", tmp_path, "--name", "x", workers=1)
    with subprocess.Popen(
        command("logs", "x"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        assert reading.stdout.readline() == b"a line\n"
        reading.stdout.close()
        assert reading.stderr.read() == b""
    assert reading.returncode == 0


def test_a_worker_that_the_run_never_had_is_refused_with_those_it_had(tmp_path: Path) -> None:
    run_unisono(SMALL + "fit()\n", tmp_path, "--name", "x")
    refused = run_command(tmp_path, "logs", "x", "--worker", "7", expect=2).output
    assert "UNI-1001  the run x has no worker 7" in refused
    assert "its workers so far: 0, 1" in refused
    assert run_command(tmp_path, "logs", "x", "--worker", "1").output == "worker 1 of x printed nothing\n"
    assert run_command(tmp_path, "logs", "x").output == "the workers of x printed nothing\n"
    assert "there is no run at y" in run_command(tmp_path, "logs", "y", expect=2).output


def test_a_script_that_runs_by_itself_has_no_logs_and_is_told_why(tmp_path: Path) -> None:
    assert "hello" in run_python(SMALL + "fit()\nprint('hello')\n", tmp_path).output
    (name,) = [path.name for path in (tmp_path / "runs").iterdir()]
    output = run_command(tmp_path, "logs", name).output
    assert output == f"the workers of {name} printed nothing; a script that runs by itself writes to its own terminal\n"


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


CHECKS = ("Python", "CPU cores", "memory", "shared memory", "disk", "temporary files", "open files", "processes",
          "clock", "torch", "bf16 product", "GPU")  # fmt: skip


def test_the_doctor_names_every_check_and_its_exit_code_is_that_of_the_worst(tmp_path: Path) -> None:
    finished = run_command(tmp_path, "doctor", timeout_s=120, expect=None)
    levels = [line[:5].strip() for line in finished.output.splitlines() if line[:5] in ("ok   ", "warn ", "bad  ")]
    assert len(levels) == len(CHECKS), finished.output
    assert [name for name in CHECKS if f" {name} " not in finished.output] == []
    assert finished.exit_code == (1 if "bad" in levels else 0), finished.output


def test_the_doctor_finds_a_run_that_is_not_there_before_anything_else(tmp_path: Path, closed_port: int) -> None:
    with Started(command("doctor", f"localhost:{closed_port}"), tmp_path, None) as visit:
        wanted = f"UNI-2102  nothing listens on port {closed_port} at 127.0.0.1"
        visit.until(lambda: wanted in visit.output, "the diagnosis", timeout_s=20)
        first, second, *_ = visit.wait(120, expect=1).output.splitlines()
    assert (first.split(), second.split()[:2]) == (
        ["ok", "name", "localhost", "is", "127.0.0.1"],
        ["bad", "connection"],
    )
    mistake = run_command(tmp_path, "doctor", "localhost", expect=2)
    assert "UNI-1001  'localhost' is not an address" in mistake.output


def test_the_doctor_asks_a_run_that_can_be_reached_what_a_joining_host_would_ask(tmp_path: Path) -> None:
    program = """
import socket, sys
from unisono.cli.doctor import doctor
from unisono.control.preflight import Finding
from unisono.core.errors import WrongSecret

def handshake(address):
    return [Finding(True, "secret", f"asked {address}"), Finding(False, "full", "", WrongSecret("no", do="yes"))]

with socket.create_server(("127.0.0.1", 0)) as server:
    sys.exit(doctor(f"127.0.0.1:{server.getsockname()[1]}", handshake))
"""
    output = run_python(program, tmp_path, expect=1, timeout_s=120).output.splitlines()
    assert [line[:22].split() for line in output[:3]] == [["ok", "name"], ["ok", "connection"], ["ok", "secret"]]
    assert output[3].split() == ["bad", "full", "UNI-2109", "no"]
    assert output[4].split() == ["do", "yes"]


def test_the_doctor_is_quick_to_leave_when_interrupted(tmp_path: Path) -> None:
    with Started(command("doctor"), tmp_path, None) as visit:
        visit.until(lambda: "processes" in visit.output, "the first checks")
        visit.send(signal.SIGINT)
        assert "Traceback" not in visit.wait(10, expect=130).output
