# SPDX-License-Identifier: Apache-2.0
"""The step of a sudden death: written by a process that is gone, read by another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from unisono.core import black_box
from unisono.elastic.activity import Activity

WRITER = """
import os, signal, sys
from pathlib import Path
from unisono.core.black_box import BlackBox
from unisono.elastic.activity import Activity

activity = Activity(box=BlackBox(Path(sys.argv[1])), generation=2)
for step in range(1000):
    activity.step = step
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_step_of_a_killed_process_can_be_read_afterwards(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    assert process.wait(timeout=20) == -signal.SIGKILL
    assert black_box.read(tmp_path, process.pid) == (999, 2)


def test_a_box_says_nothing_before_the_training_and_for_strangers(tmp_path: Path) -> None:
    box = black_box.BlackBox(tmp_path)
    assert black_box.read(tmp_path, os.getpid()) is None
    assert black_box.read(tmp_path, 1) is None
    box.write(0, 1)
    assert black_box.read(tmp_path, os.getpid()) == (0, 1)


def test_a_script_by_itself_has_no_box_and_counts_all_the_same() -> None:
    activity = Activity()
    activity.step = 7
    assert activity.step == 7
