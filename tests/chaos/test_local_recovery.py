# SPDX-License-Identifier: Apache-2.0
"""Workers die, leave and come while replicas make local steps, with DiLoCo's outer optimizer and a codec.

What a replica has of its own (its optimizer's state, and with fragments its weights) moves when workers come and go,
and is lost only with a worker that dies, which is said. Where it has nothing of its own, a death changes no bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.recovering import BEGINNING, Calm, Watch, begin, calm_run, set_pace
from multiproc.running import run_command
from unisono.core import events
from unisono.core.faults import Fault

# 30 rounds of four local steps. Each of two fragments is large enough for codes to be worth it.
SCRIPT = (
    BEGINNING
    + """
net = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Dropout(0.2), nn.Linear(256, 8))


def loss(outputs, targets):
    keep_pace()
    return nn.functional.cross_entropy(outputs, targets)


local = unisono.LocalSteps(h=4, outer="nesterov", LOCAL)
data = torch.utils.data.TensorDataset(*DATA.tensors[:2])
unisono.Trainer(
    net, torch.optim.Adam(net.parameters(), lr=0.002), loss=loss, data=data, batch_size=BATCH, epochs=2, local=local
).fit()
"""
)
WITHOUT_OWN_STATE = SCRIPT.replace("LOCAL", 'inner_state="reset"')
STREAMING = SCRIPT.replace("LOCAL", "fragments=2")
CODEC = ("--compress", "int8")
SLOW_S = 0.2


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return calm_run(STREAMING, tmp_path_factory.mktemp("calm"), *CODEC)


def lost(run: Watch) -> list[str]:
    return [event.text for event in run.of(events.Notice) if event.code == "carried-lost"]


def test_a_death_changes_no_bit_of_the_outer_momentum_or_of_codes(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    expected = calm_run(WITHOUT_OWN_STATE, tmp_path / "calm", *CODEC)
    faults = [Fault("kill", 2, 3, "collective"), Fault("kill", 0, 6, "update")]
    with begin(WITHOUT_OWN_STATE, tmp_path, *CODEC, "--max-restarts", "0", faults=faults) as run:
        run.until_fired(2)
        run.check(run.hurry(), expected, faults)
        assert not lost(run)


def test_with_fragments_replicas_move_with_all_they_have_when_workers_leave_and_come(
    calm: Calm, tmp_path: Path
) -> None:
    with begin(STREAMING, tmp_path, *CODEC) as run:
        run.until_step(3)
        run_command(tmp_path, "scale", "chaos", "2")
        run.until_many(2)
        set_pace(tmp_path, SLOW_S)
        run_command(tmp_path, "scale", "chaos", "3")
        run.until_many(3)
        run.check(run.hurry(), calm)
        assert not lost(run)


def test_with_fragments_a_death_costs_what_its_replicas_had_of_their_own_and_nothing_before_it(
    calm: Calm, tmp_path: Path
) -> None:
    faults = [Fault("kill", 1, 6, "collective")]
    with begin(STREAMING, tmp_path, *CODEC, "--max-restarts", "0", faults=faults, workers="1:3") as run:
        run.until_members(0, 2)
        finished = run.hurry()
    steps = run.of(events.StepFinished)
    assert [step.step for step in steps] == list(range(1, 31)), "a round was lost or told twice"
    assert [step.samples for step in steps] == calm.samples
    assert [step.loss for step in steps][:5] == calm.losses[:5]
    assert finished.weights_sha256 != calm.weights_sha256
    (words,) = lost(run)
    assert "a replica, with weights and an optimizer of its own, (microbatch" in words
    assert "no longer that of a run in which nobody died" in words
