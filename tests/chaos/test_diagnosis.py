# SPDX-License-Identifier: Apache-2.0
"""A failed run's last words are right: the worker, the step, the cause and the user's own line. And a run in which
nothing is wrong, however unsteady, blames nobody.

One seeded trial of each kind of trouble; bench/diagnosis.py has a hundred and sixty.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.trials import KINDS, draw, judge, run_healthily, run_trial

SEED = 1
# Where the ways to fail differ, the hardest: leaving an epoch early, a loop in Python, a kill by the kernel.
NUMBERS = {"skipped collective": 3, "endless loop in the loader": 0, "out of memory": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_screen_names_the_worker_the_step_the_cause_and_the_line(kind: str, tmp_path: Path) -> None:
    trial = draw(kind, NUMBERS.get(kind, 0), SEED)
    verdict = judge(trial, run_trial(trial, tmp_path))
    assert verdict.right, f"{trial}: {verdict}"


def test_a_healthy_run_with_fivefold_jitter_raises_no_alarm(tmp_path: Path) -> None:
    health = run_healthily(tmp_path, steps=150, jitter=5.0, hang_after_s=2.0)
    assert health.steps == 150
    assert health.slowest_over_fastest > 3, "there was no jitter to be seen"
    assert health.alarms == []
