# SPDX-License-Identifier: Apache-2.0
"""Whoever dies, however: a run that ends ends at once, says who and why, leaves nothing behind, and starts again.

With ``--max-restarts 0`` nobody is replaced, and the first death is the end. What a run survives is in the other files
of this folder; here are single deaths that it does not, and the ways in which a run as a whole is ended from outside.

That nothing is left (processes, however far they moved, and temporary directories) is checked after every test by the
fixture in tests/conftest.py.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import termios
import time
from pathlib import Path

import psutil
import pytest

from multiproc.running import MARK, Started, gone_within, left_behind, run_unisono, start_unisono
from multiproc.scripts import ENDLESS, SMALL
from unisono.core import events
from unisono.core.errors import UsageError
from unisono.core.run_dir import Recorder, create
from unisono.core.spec import RunSpec

# A loader process, a child, and a child in a session of its own, as daemons have it.
FAMILY = """
import subprocess

if not Path("again").exists():
    subprocess.Popen(["sleep", "1001"])
    subprocess.Popen(["sleep", "1002"], start_new_session=True)
fit(data=unisono.Data(DATA, loader_processes=1), **LONG)
"""


def processes_of(tmp_path: Path) -> list[psutil.Process]:
    return left_behind(os.environ[MARK], tmp_path)


def commands(processes: list[psutil.Process]) -> list[str]:
    return [" ".join(process.cmdline()) for process in processes]


def end_by(started: Started, number: int, within_s: float, told: int = 0) -> None:
    """Send a signal to the supervisor: everything ends in time, and the output names the signal, or the one `told`."""
    sent_s = time.monotonic()
    started.send(number)
    finished = started.wait(timeout_s=20, expect=130)
    took_s = time.monotonic() - sent_s
    assert took_s < within_s, f"{took_s:.1f} s\n{finished.output}"
    assert f"UNI-4001  stopped by {signal.Signals(told or number).name}" in finished.output
    assert finished.output.count("UNI-") == 1, f"somebody else was blamed\n{finished.output}"
    assert [event.exit_code for event in finished.events_of(events.RunFailed)] == [130]


def test_ctrl_c_ends_a_run_with_all_its_offspring_and_it_starts_again(tmp_path: Path) -> None:
    with start_unisono(ENDLESS + FAMILY, tmp_path) as started:
        started.wait_for_steps(2)
        assert len(processes_of(tmp_path)) >= 11, "command, guard, coordinator, 2 workers, each with a loader and two"
        end_by(started, signal.SIGINT, within_s=2)
        assert gone_within(0.5, lambda: processes_of(tmp_path)), commands(processes_of(tmp_path))
    (tmp_path / "again").write_text("4")
    run_unisono(ENDLESS + FAMILY, tmp_path)


def test_ctrl_c_cuts_a_run_short_that_takes_its_time_to_leave(tmp_path: Path) -> None:
    stuck = "fit(callbacks=[Every(lambda step: time.sleep(1000 * (step == 3)))])\n"
    with start_unisono(SMALL + stuck, tmp_path) as started:
        started.wait_for_steps(3)
        started.send(signal.SIGTERM)
        end_by(started, signal.SIGINT, within_s=2)


def test_ctrl_c_ends_a_run_whose_worker_is_frozen(tmp_path: Path) -> None:
    with start_unisono(ENDLESS + "fit(**LONG)\n", tmp_path) as started:
        started.wait_for_steps(2)
        os.kill(started.worker_pid(1), signal.SIGSTOP)
        end_by(started, signal.SIGINT, within_s=3)


def test_ctrl_c_ends_a_run_that_is_about_to_replace_a_worker_and_that_death_is_not_blamed(tmp_path: Path) -> None:
    with start_unisono(ENDLESS + "fit(**LONG)\n", tmp_path) as started:
        started.wait_for_steps(2)
        os.kill(started.worker_pid(1), signal.SIGKILL)
        started.until(lambda: started.events_of(events.WorkerRemoved), "the death to be noticed")
        end_by(started, signal.SIGINT, within_s=3)


def test_a_second_signal_does_not_wait_for_workers_that_ignore_the_first(tmp_path: Path) -> None:
    """Two different ones: of two equal ones that come together the kernel delivers one."""
    deaf = "import signal\n\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nPath('deaf').touch()\ntime.sleep(1000)\n"
    with start_unisono(SMALL + deaf, tmp_path, workers=1) as started:
        started.until((tmp_path / "deaf").exists, "the worker to turn a deaf ear")
        started.send(signal.SIGINT)
        end_by(started, signal.SIGTERM, within_s=0.9, told=signal.SIGINT)


def test_a_killed_supervisor_takes_everybody_along_and_the_same_command_works_again(tmp_path: Path) -> None:
    with start_unisono(ENDLESS + FAMILY, tmp_path) as started:
        started.wait_for_steps(2)
        started.send(signal.SIGKILL)
        started.wait(timeout_s=5, expect=-signal.SIGKILL)
        assert gone_within(2, lambda: processes_of(tmp_path)), commands(processes_of(tmp_path))
        assert not list(Path(os.environ["TMPDIR"]).glob("unisono-*"))
    (tmp_path / "again").write_text("4")
    run_unisono(ENDLESS + FAMILY, tmp_path)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["was ended by SIGKILL", "memory runs out"]),
        ("ctypes.string_at(0)", ["was ended by SIGSEGV", "native code", 'train.py", line']),
        ("os._exit(5)", ["ended with exit code 5 and said nothing", "last words", "worker-1.log"]),
        ("os._exit(0)", ["ended with exit code 0 before the training was finished"]),
        ("raise MemoryError('no more')", ["MemoryError: no more", "memory, or its device, gave out", "in fail: raise"]),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit 5", "exit 0", "MemoryError"],
)
def test_a_worker_that_dies_unreplaced_is_named_and_nobody_else_is_blamed(
    fault: str, says: list[str], tmp_path: Path
) -> None:
    script = f"""
import ctypes
import signal
import subprocess


def fail(step):
    if WORKER == 1 and step == 3:
        subprocess.Popen(["sleep", "1003"], start_new_session=True)
        print("last words")
        {fault}


fit(callbacks=[Every(fail)], max_steps=1_000_000)
"""
    finished = run_unisono(SMALL + script, tmp_path, "--max-restarts", "0", expect=20)
    for text in ("UNI-2001 ", "worker 1 on ", *says):
        assert text in finished.output, f"{text!r} is not in:\n{finished.output}"
    assert finished.output.count("UNI-") == 1, finished.output
    assert "worker 0" not in finished.output
    assert "last words" in finished.log(1)


def test_an_exception_behind_a_death_that_was_survived_is_what_is_shown(tmp_path: Path) -> None:
    script = """
import signal


def fail(step):
    if WORKER == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if WORKER == 2 and step == 6:
        raise ValueError("a bad day")


fit(callbacks=[Every(fail)], max_steps=1_000_000)
"""
    finished = run_unisono(SMALL + script, tmp_path, expect=10)
    assert "UNI-1101  ValueError: a bad day" in finished.output
    assert "worker 2 on " in finished.output
    assert finished.output.count("UNI-") == 1, finished.output


def test_a_worker_that_hangs_unreplaced_is_named_with_its_line(tmp_path: Path) -> None:
    script = """
def fail(step):
    if WORKER == 1 and step == 3:
        time.sleep(1000)  # here


fit(callbacks=[Every(fail)], max_steps=1_000_000)
"""
    finished = run_unisono(SMALL + script, tmp_path, "--max-restarts", "0", "--hang-after", "2", expect=20)
    line = (SMALL + script).split("# here")[0].count("\n") + 1
    for text in ("UNI-2003  worker 1 on ", f"train.py:{line}, in fail: time.sleep(1000)", "worker 0 is waiting"):
        assert text in finished.output, f"{text!r} is not in:\n{finished.output}"
    assert set(re.findall(r"UNI-\d+", finished.output)) == {"UNI-2003"}, "told when it was found, and as the end"


def test_a_killed_loader_process_is_named(tmp_path: Path) -> None:
    script = """
import multiprocessing
import signal


def fail(step):
    if WORKER == 1 and step == 3:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


fit(data=unisono.Data(DATA, loader_processes=1), callbacks=[Every(fail)], max_steps=1_000_000)
"""
    finished = run_unisono(SMALL + script, tmp_path, "--max-restarts", "0", expect=20)
    for text in ("UNI-2001", "a loader process died", "worker 1 on ", "train.py:", "lower loader_processes"):
        assert text in finished.output, finished.output
    assert finished.output.count("UNI-") == 1, finished.output


def test_two_runs_at_once_in_one_folder_never_collide_and_broken_terminals_disturb_neither(tmp_path: Path) -> None:
    script = SMALL + "fit()\n"
    read_end, write_end = os.pipe()
    os.close(read_end)  # like a pager that was left
    full = os.open("/dev/full", os.O_WRONLY)
    with (
        start_unisono(script, tmp_path, stdout=full, stderr=full) as one,
        start_unisono(script, tmp_path, stdout=write_end, stderr=write_end) as two,
    ):
        os.close(write_end)
        os.close(full)
        first, second = one.wait(), two.wait()
    assert first.run_dir != second.run_dir
    assert first.weights_sha256 == second.weights_sha256


def test_of_two_runs_that_find_the_same_directory_empty_one_gets_it(tmp_path: Path) -> None:
    spec = RunSpec(script="train.py", run_dir=str(tmp_path / "run"))
    one, two = (Recorder(create(spec, 0.0)[1], spec) for _ in range(2))
    one.start()
    with pytest.raises(UsageError, match="is in use by a run that is running"):
        two.start()
    one.close()
    two.close()


def test_a_flood_of_output_is_kept_to_the_last_byte_with_every_stream_closed(tmp_path: Path) -> None:
    """And with a child that keeps the worker's output open after the end, from a session of its own."""
    script = """
import subprocess
import sys

for number in range(100_000):
    print("line", number)
sys.stdout.buffer.write(b"\\xff\\x00\\xfe\\x1b[2J")
sys.stdout.flush()
child = subprocess.Popen(["sleep", "1004"], start_new_session=True)
Path("child").write_text(str(child.pid))
fit()
os.write(1, b"no newline at the end")
"""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    finished = run_unisono(SMALL + script, tmp_path, workers=1, wrapper=closed)
    assert finished.result is not None
    assert finished.output == ""
    log = (finished.run_dir / "logs" / "worker-0.log").read_bytes() if finished.run_dir else b""
    lines = b"".join(b"line %d\n" % number for number in range(100_000))
    assert log == lines + b"\xff\x00\xfe\x1b[2J" + b"no newline at the end"
    child = psutil.Process(int((tmp_path / "child").read_text()))
    assert child.is_running(), "after a success, what was sent away on purpose may stay"
    child.kill()
    assert finished.seconds < 60


def test_a_machine_that_allows_no_more_files_says_so_and_stops_the_workers_it_had_started(tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 24 && exec "$@"', "sh"]
    finished = run_unisono(SMALL + "fit()\n", tmp_path, workers=12, wrapper=limited, expect=20)
    assert "UNI-2001" in finished.output
    assert "could not be started: Too many open files" in finished.output
    assert "use fewer --workers (now 12)" in finished.output


def _sit_down_at_the_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be running under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def start_on_a_terminal(tmp_path: Path) -> tuple[Started, int]:
    """The command with a terminal of 80 columns as its own, and our end of that."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    started = start_unisono(
        ENDLESS + "fit(**LONG)\n",
        tmp_path,
        env={"COLUMNS": None, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=_sit_down_at_the_terminal,
    )
    os.close(theirs)
    return started, ours


def test_a_terminal_shows_two_tidy_lines_and_is_left_as_it_was_by_ctrl_z_and_ctrl_c(tmp_path: Path) -> None:
    started, terminal = start_on_a_terminal(tmp_path)
    with started, os.fdopen(terminal, "rb+", buffering=0) as screen:
        os.set_blocking(terminal, False)
        shown = b""

        def read_until(text: bytes) -> bool:
            nonlocal shown
            shown += screen.read() or b""
            return text in shown

        started.until(lambda: read_until("█".encode()), "the panel")
        screen.write(b"\x1a")
        everybody = [started.pid, started.worker_pid(0), started.worker_pid(1)]
        started.until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in everybody), "Ctrl-Z")
        read_until(b"")
        assert shown.rfind(_SHOW_CURSOR) > shown.rfind(_HIDE_CURSOR)
        started.send(signal.SIGCONT)
        steps = len(started.events_of(events.StepFinished))
        started.wait_for_steps(steps + 10)
        shown = b""
        started.until(lambda: read_until("█".encode()), "the panel again")
        screen.write(b"\x03")
        started.until(lambda: read_until(b"UNI-4001"), "the last screen", timeout_s=5)
        started.wait(timeout_s=5, expect=130)
        assert shown.rfind(_SHOW_CURSOR) > shown.rfind(_HIDE_CURSOR)
        local_flags = termios.tcgetattr(terminal)[3]
        assert local_flags & termios.ECHO
        assert local_flags & termios.ICANON
    text = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode(errors="replace")
    panel = [line for line in re.split(r"[\r\n]|\x1b\[\S*?[A-Za-z]", text) if "█" in line or "step " in line]
    assert {len(line) for line in panel if "█" in line} <= set(range(40, 81)), panel
    assert all(len(line) <= 80 for line in panel), panel


_SHOW_CURSOR, _HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


def test_a_closed_terminal_ends_the_run(tmp_path: Path) -> None:
    started, terminal = start_on_a_terminal(tmp_path)
    with started:
        started.wait_for_steps(2)
        os.close(terminal)
        finished = started.wait(timeout_s=5, expect=130)
    assert finished.events_of(events.RunFailed)[0].failure["what"] == "stopped by SIGHUP"
