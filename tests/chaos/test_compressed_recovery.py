# SPDX-License-Identifier: Apache-2.0
"""Workers die, hang, fall silent, leave and come, and so does the coordinator, while gradients travel compressed.

A codec that keeps nothing has the bits of a calm run whatever happens. One with error feedback keeps what it has not
sent yet with each microbatch: it moves along when workers come and go, is saved, and is lost only with a worker that
dies, which is said.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chaos.recovering import BEGINNING, Calm, Watch, begin, calm_run, set_pace
from multiproc.running import run_command, run_unisono, start_unisono
from unisono.core import events
from unisono.core.faults import Fault

# Large enough for codes to be worth it: the buckets of 9,796 elements.
SCRIPT = (
    BEGINNING
    + """
net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loss(outputs, targets):
    keep_pace()
    return nn.functional.cross_entropy(outputs, targets)


data = torch.utils.data.TensorDataset(*DATA.tensors[:2])
unisono.Trainer(net, optimizer, loss=loss, data=data, batch_size=BATCH, epochs=2).fit()
"""
)


def calm(folder: Path, codec: str) -> Calm:
    folder.mkdir()
    return calm_run(SCRIPT, folder, "--compress", codec)


def lost(run: Watch) -> list[str]:
    return [event.text for event in run.of(events.Notice) if event.code == "carried-lost"]


@pytest.mark.parametrize("codec", ["int8", "int4:stochastic"])
def test_workers_are_killed_and_the_bits_of_a_codec_that_keeps_nothing_stay(codec: str, tmp_path: Path) -> None:
    expected = calm(tmp_path / "calm", codec)
    faults = [Fault("kill", 1, 5, "collective"), Fault("kill", 3, 9, "forward")]
    with begin(SCRIPT, tmp_path, "--compress", codec, faults=faults) as run:
        run.until_fired(2)
        run.check(run.hurry(), expected, faults)
        assert not lost(run)


def test_every_kind_of_fault_leaves_the_bits_of_a_codec_that_keeps_nothing(tmp_path: Path) -> None:
    """One worker after the other: with a flipped bit, killed, silent while it gives the state to a joiner, and hung."""
    expected = calm(tmp_path / "calm", "int8")
    faults = [
        Fault("slow", 0, 2, factor=2.0, until=9),
        Fault("freeze", 3, 3, "collective", seconds=0.2),
        Fault("corrupt", 1, 5),
        Fault("kill", 0, 8, "collective"),
        Fault("drop", 3, 8, "heal"),
        Fault("hang", 2, 12, "data"),
    ]
    options = ("--compress", "int8", "--verify-every", "1", "--hang-after", "4")
    with begin(SCRIPT, tmp_path, *options, faults=faults) as run:
        run.until_fired(len(faults))
        run.until(lambda: run.members and not set(run.members) & {0, 1, 2, 3}, "others in their places")
        run.check(run.hurry(), expected, faults)
        assert {event.who for event in run.of(events.WorkerRemoved) if event.how == "corrupt"} == {1}


def test_the_coordinator_dies_and_what_was_not_sent_yet_is_sent_all_the_same(tmp_path: Path) -> None:
    """Between its two deaths a worker leaves, and hands over what it keeps."""
    expected = calm(tmp_path / "calm", "onebit")
    with begin(SCRIPT, tmp_path, "--compress", "onebit", workers="1:3") as run:
        run.until_step(4)
        run.kill_coordinator()
        run.until_step(run.step + 3)
        os.kill(run.it.worker_pid(1), signal.SIGTERM)
        run.until_many(2)
        run.kill_coordinator()
        run.until_step(run.step + 3)
        run.check(run.hurry(), expected)
        assert [event.number for event in run.of(events.CoordinatorStarted)] == [1, 2, 3]
        assert not lost(run)


def test_a_death_takes_what_was_not_sent_yet_with_it_and_that_is_said(tmp_path: Path) -> None:
    faults = [Fault("kill", 2, 6, "collective")]
    with begin(SCRIPT, tmp_path, "--compress", "onebit", faults=faults) as run:
        run.until_fired(1)
        finished = run.hurry()
    assert finished.result is not None
    assert finished.result["steps"] == 120
    steps = [event.step for event in run.of(events.StepFinished)]
    assert steps == list(range(1, 121)), "a step was lost or told twice"
    (words,) = lost(run)
    assert "what the compression has not sent yet" in words
    assert "no longer that of a run in which nobody died" in words


def test_what_was_not_sent_yet_moves_with_its_microbatch_when_workers_leave_and_come(tmp_path: Path) -> None:
    expected = calm(tmp_path / "calm", "topk:0.05")
    with begin(SCRIPT, tmp_path, "--compress", "topk:0.05", workers="1:4") as run:
        run.until_step(4)
        run_command(tmp_path, "scale", "chaos", "2")
        run.until(lambda: len(run.members) == 2 or None, "two workers")
        run_command(tmp_path, "scale", "chaos", "3")
        run.until(lambda: len(run.members) == 3 or None, "three workers")
        run.check(run.hurry(), expected)
        assert not lost(run)


def test_a_worker_that_is_wanted_back_hands_over_what_it_has_not_sent_yet(tmp_path: Path) -> None:
    expected = calm(tmp_path / "calm", "onebit")
    with begin(SCRIPT, tmp_path, "--compress", "onebit", "--max-restarts", "0", workers="1:3") as run:
        run.until_step(4)
        os.kill(run.it.worker_pid(1), signal.SIGTERM)
        run.until(lambda: len(run.members) == 2 or None, "two workers")
        run.check(run.hurry(), expected)
        assert not lost(run)


@pytest.mark.parametrize("codec", ["onebit", "powersgd:2"])
def test_everybody_is_killed_and_another_number_goes_on_with_the_same_bits(codec: str, tmp_path: Path) -> None:
    expected = calm(tmp_path / "calm", codec)
    options = ("--microbatches", "4", "--name", "r", "--checkpoint-every", "10", "--compress", codec)
    set_pace(tmp_path, 0.02)
    with start_unisono(SCRIPT, tmp_path, *options, workers=3) as started:
        started.until(lambda: any(event.kind == "checkpoint_saved" for event in started.events), "a checkpoint", 60)
        started.send(signal.SIGKILL)
        started.wait(expect=-signal.SIGKILL)
    set_pace(tmp_path, 0.0)
    finished = run_unisono(SCRIPT, tmp_path, *options, workers=2)
    assert len(finished.events_of(events.Resumed)) == 1
    assert finished.weights_sha256 == expected.weights_sha256
    assert [event.loss for event in finished.events_of(events.StepFinished)] == expected.losses
