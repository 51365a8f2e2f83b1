# SPDX-License-Identifier: Apache-2.0
"""What the README promises, done as a reader would do it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multiproc.running import run_command, run_python, run_unisono

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_script_in_the_readme_gives_one_hash_by_python_and_on_four_workers(readme: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.S)
    if readme == "README.zh-CN.md":
        assert [line for line in script.splitlines() if not line.startswith("#")] == [
            line for line in english().splitlines() if not line.startswith("#")
        ]
        return
    alone = run_python(script, tmp_path)
    four = run_unisono(script, tmp_path, workers=4)
    assert alone.weights_sha256 == four.weights_sha256
    assert run_command(tmp_path, "hash", str(four.run_dir)).output.strip() == alone.weights_sha256
    shown = run_command(tmp_path, "show", str(four.run_dir)).output
    assert "finished" in shown
    assert four.weights_sha256 in shown.replace("\n", "")


def english() -> str:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return script


def test_the_demo_takes_under_two_minutes_and_shows_one_hash_for_two_and_one_worker(tmp_path: Path) -> None:
    started = time.monotonic()
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert time.monotonic() - started < 120
    hashes = re.findall(r"^(?:two workers|one worker) +([0-9a-f]{64})$", finished.stdout, re.M)
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    assert "What to try next" in finished.stdout
    accuracy = [float(value) for value in re.findall(r"^metrics .*accuracy ([0-9.]+) %", finished.stderr, re.M)]
    assert len(accuracy) == 2
    assert min(accuracy) >= 97.5


@pytest.mark.parametrize("target", ["demo", "demo-text", "demo-kill", "test", "check", "bench", "clean"])
def test_every_make_target_that_is_named_exists(target: str) -> None:
    planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert planned.strip()


def test_importing_unisono_does_not_import_torch_and_help_is_quick(tmp_path: Path) -> None:
    code = "import sys, unisono, unisono.cli.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=30)
    fastest = min(run_command(tmp_path, "--help").seconds for _ in range(3))
    assert fastest < 2.0, "bench/startup.py has the real goal, 0.4 s; this only notices a heavy import"
