# SPDX-License-Identifier: Apache-2.0
"""The helper of these tests itself: what hangs is ended and shows its stack, what was left behind is found."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from multiproc.running import MARK, gone_within, left_behind, run_unisono, start_unisono


def test_a_command_that_hangs_is_ended_with_the_stacks_of_its_workers(tmp_path: Path) -> None:
    waits = "print('WAITS', flush=True) or time.sleep(1000)"
    script = f"import time\n\n\ndef wait_for_ever():\n    {waits}\n\n\nwait_for_ever()\n"
    with start_unisono(script, tmp_path) as it:
        it.until(lambda: it.report().count("\nWAITS\n") == 2, "both workers to wait")  # each in its log
        hung_s = time.monotonic()
        with pytest.raises(pytest.fail.Exception) as caught:
            it.wait(timeout_s=0.5)
    message = str(caught.value)
    assert "still running after 0.5 s" in message
    assert message.count('train.py", line 5 in wait_for_ever') >= 2, message
    assert time.monotonic() - hung_s < 26


def test_an_unexpected_exit_code_shows_the_output_and_the_logs(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_unisono("print('from the log')\nraise SystemExit(3)\n", tmp_path, workers=1)
    for text in ("exit code 10, expected 0", "UNI-1101", "worker-0.log", "from the log"):
        assert text in str(caught.value)


def test_a_process_that_moved_away_is_found_by_its_environment(tmp_path: Path) -> None:
    command, pipe = ["sh", "-c", "echo here; read for_ever"], subprocess.PIPE
    child = subprocess.Popen(command, start_new_session=True, cwd="/", stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"  # while a program starts, the kernel shows no environment
    found = left_behind(os.environ[MARK], tmp_path)
    assert [process.pid for process in found] == [child.pid]
    child.kill()
    assert gone_within(2, lambda: left_behind(os.environ[MARK], tmp_path))
    child.communicate()
