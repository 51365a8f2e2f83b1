# SPDX-License-Identifier: Apache-2.0
"""Stacks taken from outside: a process that sleeps, one that never lets go of the interpreter, and one that is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unisono.core import stacks

PATIENCE_S = 10.0
SCRIPT = """
import sys, threading, time
from pathlib import Path
from unisono.core import stacks

def read_the_disk():
    print("there", flush=True) or {stuck}  # STUCK

stacks.write_on_request(Path(sys.argv[1]))
threading.Thread(target=lambda: time.sleep(60), daemon=True).start()
read_the_disk()
"""


@contextmanager
def stuck_process(folder: Path, stuck: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the user's own that is in the line given, and has told us so."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("{stuck}", stuck))
    process = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param("time.sleep(60)", id="it sleeps"),
        pytest.param("sum(range(10**11))", id="it is in C and never lets go of the interpreter"),
    ],
)
def test_the_users_line_is_found_from_outside_as_often_as_it_is_asked_for(tmp_path: Path, stuck: str) -> None:
    with stuck_process(tmp_path, stuck) as process:
        for _ in range(2):
            found = stacks.ask(tmp_path, [process.pid], PATIENCE_S)
            line = stacks.user_line(found[process.pid])
            assert line.startswith(f"{tmp_path / 'train.py'}:")
            assert "in read_the_disk: " in line
            assert line.endswith(f"{stuck}  # STUCK")
            assert found[process.pid].count("read_the_disk") == 1, "only the newest stack"
        assert process.poll() is None, "it goes on unharmed"


def test_a_process_that_cannot_answer_any_more_is_not_waited_for_for_long(tmp_path: Path) -> None:
    with stuck_process(tmp_path, "time.sleep(60)") as process:
        process.kill()
        process.wait()
        assert stacks.ask(tmp_path, [process.pid], 0.05) == {}


def test_a_process_that_never_offered_its_stack_gets_no_signal(tmp_path: Path) -> None:
    """The signal would end it: that is what an unknown one does."""
    code = "print('there', flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert stacks.ask(tmp_path, [process.pid], 0.05) == {}
        assert process.poll() is None
        process.kill()


DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait
  File "{here}/other.py", line 1 in helper

Current thread 0x00007f2 (most recent call first):
  File "{library}", line 20 in gather
  File "{here}/data.py", line 2 in __getitem__
  File "{here}/train.py", line 9 in <module>
"""


def dump(folder: Path) -> str:
    return DUMP.replace("{here}", str(folder)).replace("{library}", str(Path(stacks.__file__)))


def test_the_main_thread_is_the_last_one_in_a_dump(tmp_path: Path) -> None:
    frames = stacks.main_thread(dump(tmp_path))
    assert [name for _, _, name in frames] == ["gather", "__getitem__", "<module>"]


def test_the_innermost_line_of_the_users_own_code_counts(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("def __getitem__(self, i):\n    return read(i)\n")
    assert stacks.user_line(dump(tmp_path)) == f"{tmp_path}/data.py:2, in __getitem__: return read(i)"


def test_a_line_whose_source_is_gone_is_still_named(tmp_path: Path) -> None:
    assert stacks.user_line(dump(tmp_path)) == f"{tmp_path}/data.py:2, in __getitem__"


@pytest.mark.parametrize("text", ["", "no stack at all\n", "Fatal Python error: Segmentation fault\n\n"])
def test_a_text_without_a_stack_names_no_line(text: str) -> None:
    assert stacks.user_line(text) == ""


def crash(current: str, main: str) -> str:
    """A log whose end is the dump of a crash in another thread than the main one."""
    return (
        'an older dump\nThread 0x1 (most recent call first):\n  File "/old.py", line 1 in old\n'
        "Fatal Python error: Segmentation fault\n\n"
        f'Current thread 0x2 (most recent call first):\n  File "{current}", line 3 in f\n\n'
        f'Thread 0x1 (most recent call first):\n  File "{main}", line 4 in g\n'
    )


@pytest.mark.parametrize(
    ("current", "main", "line"),
    [
        ("/home/u/native.py", "/home/u/train.py", "/home/u/native.py:3, in f"),
        (stacks.__file__, "/home/u/train.py", "/home/u/train.py:4, in g"),  # a thread of ours: then the user's own
        (stacks.__file__, stacks.__file__, ""),
    ],
)
def test_of_a_crash_the_thread_that_crashed_counts_first(current: str, main: str, line: str) -> None:
    assert stacks.crash_line(crash(current, main)) == line


def test_a_stack_in_a_log_without_a_crash_is_none() -> None:
    assert stacks.crash_line('Thread 0x1 (most recent call first):\n  File "/old.py", line 1 in old\n') == ""


def stack(*lines: str) -> str:
    """As faulthandler writes it, the innermost first; the main thread is the last."""
    frames = "".join(f'  File "{file}", line 7 in work\n' for file in lines)
    return f'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\nThread 0x2:\n{frames}'


WAITS = stack("/site/torch/distributed/distributed_c10d.py", "/me/train.py")
WAITS_TOO = stack("/site/torch/_ops.py", "/site/torch/distributed/_functional_collectives.py", "/me/train.py")
COMPUTES = stack("/me/train.py", "/site/torch/distributed/pipelining/stage.py")


@pytest.mark.parametrize(
    ("first", "others", "late"),
    [
        (WAITS, {1: COMPUTES}, 1),
        (WAITS, {1: WAITS_TOO, 2: COMPUTES, 3: COMPUTES}, 2),
        (WAITS_TOO, {1: WAITS, 2: ""}, 2),  # no answer: stopped, or in native code
        (COMPUTES, {1: WAITS}, 0),
        (COMPUTES, {1: WAITS, 2: COMPUTES}, None),
        (COMPUTES, {1: COMPUTES}, None),
        (COMPUTES, {}, None),
        (WAITS, {1: WAITS_TOO}, None),
        (WAITS, {}, None),
        ("", {1: COMPUTES}, None),
        ("", {1: WAITS}, None),
    ],
)
def test_the_rank_that_keeps_its_replica_waiting_is_the_one_that_does_not_wait(
    first: str, others: dict[int, str], late: int | None
) -> None:
    assert stacks.late_rank(first, others) == late


def test_a_first_rank_that_waits_for_other_replicas_does_not_keep_its_own_waiting() -> None:
    assert stacks.late_rank(COMPUTES, {1: WAITS}) == 0
    assert stacks.late_rank(COMPUTES, {1: WAITS}, waits=True) is None


def test_ranks_that_all_wait_are_told_from_those_of_which_one_computes() -> None:
    assert stacks.all_in_collectives([WAITS, WAITS_TOO])
    assert not stacks.all_in_collectives([WAITS, COMPUTES])
    assert not stacks.all_in_collectives([WAITS, ""])
