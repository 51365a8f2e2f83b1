# SPDX-License-Identifier: Apache-2.0
"""Servers and workers die while gradients travel to servers compressed.

What a codec keeps is with the workers, so the death of a server takes none of it: the bits are those of a calm run,
with codecs that keep something too. The death of a worker costs what it costs in an all-reduce.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chaos.recovering import BEGINNING, Calm, Watch, begin, calm_run
from multiproc.running import run_command
from unisono.core import events
from unisono.core.faults import Fault

# 60 steps; large enough for codes to be worth it.
SCRIPT = (
    BEGINNING.replace("960, 16, 5", "320, 16, 3")
    + """
net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loss(outputs, targets):
    keep_pace()
    return nn.functional.cross_entropy(outputs, targets)


data = torch.utils.data.TensorDataset(*DATA.tensors[:2])
unisono.Trainer(net, optimizer, loss=loss, data=data, batch_size=BATCH, epochs=EPOCHS).fit()
"""
)
NEVER = ("--checkpoint-every", "never")
TWO = ("--servers", "2", "--copies", "2")


def calm(folder: Path, codec: str) -> Calm:
    """By all-reduce."""
    folder.mkdir()
    return calm_run(SCRIPT, folder, "--compress", codec)


def asked(codec: str) -> tuple[str, ...]:
    return "--strategy", "ps", "--compress", codec


def lost(run: Watch) -> list[str]:
    return [event.text for event in run.of(events.Notice) if event.code == "carried-lost"]


@pytest.mark.parametrize("codec", ["int8", "onebit"])
def test_a_server_is_killed_and_nothing_of_what_the_codec_keeps_is_lost(codec: str, tmp_path: Path) -> None:
    """Twice: at the push, and at the update; another has each slice. A new server takes the dead one's place."""
    expected = calm(tmp_path / "calm", codec)
    faults = [Fault("kill", 2, 5, "collective"), Fault("kill", 3, 30, "update")]
    with begin(SCRIPT, tmp_path, *asked(codec), *TWO, *NEVER, faults=faults, workers="2:2") as run:
        run.until_fired(2)
        run.check(run.hurry(), expected, faults)
        assert not lost(run)


@pytest.mark.parametrize("codec", ["int8", "topk:0.05"])
def test_a_server_with_the_only_copy_is_killed_and_the_run_goes_back_to_its_checkpoint(
    codec: str, tmp_path: Path
) -> None:
    """And to what the codec had kept then."""
    expected = calm(tmp_path / "calm", codec)
    with begin(SCRIPT, tmp_path, *asked(codec), "--checkpoint-every", "10", workers="1:2") as run:
        run.until_step(23)
        run.kill(2)
        run.until_many(3, without=[2])
        finished = run.hurry()
    steps = run.of(events.StepFinished)
    assert [step.loss for step in steps] == expected.losses
    assert finished.weights_sha256 == expected.weights_sha256
    assert [event.code for event in run.of(events.Notice) if event.code == "slices-lost"]
    assert not lost(run)


def test_workers_are_killed_and_the_bits_of_a_codec_that_keeps_nothing_stay(tmp_path: Path) -> None:
    expected = calm(tmp_path / "calm", "int8:stochastic")
    faults = [Fault("kill", 1, 4), Fault("kill", 3, 20, "collective"), Fault("kill", 4, 40, "update")]
    with begin(SCRIPT, tmp_path, *asked("int8:stochastic"), *NEVER, faults=faults, workers="1:2") as run:
        run.until_fired(3)
        run.check(run.hurry(), expected, faults)


def test_workers_come_and_leave_and_hand_over_what_the_codec_keeps(tmp_path: Path) -> None:
    expected = calm(tmp_path / "calm", "onebit")
    with begin(SCRIPT, tmp_path, *asked("onebit"), *NEVER, workers="1:2") as run:
        run.until_step(3)
        run_command(tmp_path, "scale", "chaos", "3")
        run.until_many(4)
        run.until_step(run.step + 2)
        run_command(tmp_path, "scale", "chaos", "2")
        run.until_many(3)
        run.until_step(run.step + 2)
        run.signal(2, signal.SIGTERM)  # the server
        run.until(lambda: run.members and 2 not in run.members, "the others to go on")
        run.check(run.hurry(), expected)
        assert not lost(run)


def test_without_waiting_a_worker_that_leaves_hands_over_what_its_codes_have_not_said(tmp_path: Path) -> None:
    with begin(SCRIPT, tmp_path, *asked("topk:0.05"), "--staleness", "inf", *NEVER, workers="1:2") as run:
        run.until_step(1)
        run_command(tmp_path, "scale", "chaos", "1")
        run.until_many(2)
        run.hurry()
        assert run.of(events.StepFinished)[-1].step == 60
        assert not lost(run)
