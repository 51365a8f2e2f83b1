# SPDX-License-Identifier: Apache-2.0
"""Workers die, freeze and come, the coordinator dies: the run goes on, and comes to the same bits as if nothing had been.

Each test ends with `Watch.check`: the fault happened, every step and every sample once, the losses and the weights of
the calm run, nothing left behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.recovering import SCRIPT, Calm, begin, calm_run, set_pace
from unisono.core.faults import Fault


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return calm_run(SCRIPT, tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize("place", ["forward", "collective", "update"])
def test_each_of_four_is_killed_in_turn(place: str, calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("kill", worker, 6 + 4 * worker, place) for worker in range(3)]
    faults.append(Fault("kill", 3, 60, place))
    with begin(SCRIPT, tmp_path, faults=faults) as run:
        run.until_fired(3)
        set_pace(tmp_path, 0.15)  # worker 3 is alone; somebody must be there before step 60
        run.until_many(4)
        set_pace(tmp_path, 0.01)
        run.until_fired(4)
        run.check(run.hurry(), calm, faults)
        assert 3 not in run.members
