# SPDX-License-Identifier: Apache-2.0
"""Runs with parameter servers in which workers, servers and the coordinator die, stop, slow down, come and go.

At staleness 0 such a run ends with the bits of a calm one. With more, the bits are nobody's; but `tally` counts in the
weights how often each sample was learnt from, so an update that was lost or made twice shows.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from chaos.recovering import BEGINNING, Calm, Watch, begin, calm_run, set_pace
from multiproc.running import Finished, run_command
from unisono.core import events
from unisono.core.faults import Fault
from unisono.core.run_dir import RunDir

SERVERS = ("--strategy", "ps")
STEPS, EPOCHS, BATCH = 60, 3, 16  # 20 steps an epoch
SAVING = ("--checkpoint-every", "10")
NEVER = ("--checkpoint-every", "never")
QUICKLY_S = 20  # for a run that cannot go on


def script(momentum: float = 0.0, samples: int = 320, width: int = 16) -> str:
    beginning = BEGINNING.replace("960, 16, 5", f"{samples}, {BATCH}, {EPOCHS}")
    return (
        beginning
        + f"""
model = Tallied(nn.Sequential(nn.Linear(8, {width}), nn.Tanh(), nn.Dropout(0.2), nn.Linear({width}, 4)))
groups = [{{"params": model.net.parameters(), "momentum": {momentum}}}, {{"params": [model.tally], "lr": float(BATCH)}}]
optimizer = torch.optim.SGD(groups, lr=0.05)
unisono.Trainer(model, optimizer, objective=objective, data=DATA, batch_size=BATCH, epochs=EPOCHS).fit()
"""
    )


PLAIN = script()  # a server has nothing that the workers do not have
MOMENTUM = script(momentum=0.9)  # part of the state is with the servers alone
UNEVEN = script(samples=321)  # the last batch of an epoch is one sample
LARGE_UNEVEN = script(momentum=0.9, samples=321, width=512)  # slices are as large as the others to a few percent


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return calm_run(PLAIN, tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def calm_momentum(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return calm_run(MOMENTUM, tmp_path_factory.mktemp("calm"))


def serving(run: Watch) -> list[int]:
    """The members of the newest generation that compute nothing."""
    run.look()
    formed = run.of(events.MembershipChanged)[-1]
    return [who for who, (first, last) in zip(formed.members, formed.ranges, strict=True) if first == last]


def check_went_back(run: Watch, finished: Finished, calm: Calm) -> list[int]:
    """The bits of the calm run, and every step told with its loss; returns the checkpoints that it went back to."""
    steps = run.of(events.StepFinished)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [step.loss for step in steps] == calm.losses
    assert [step.samples for step in steps] == calm.samples
    assert finished.weights_sha256 == calm.weights_sha256
    check_nothing_failed(run)
    told = [event.text for event in run.of(events.Notice) if event.code == "slices-lost"]
    return [int(text.rpartition("checkpoint of step ")[2]) for text in told]


def check_loose(run: Watch, finished: Finished, samples: int = 320) -> None:
    """What holds for a run with staleness: all steps, every sample once an epoch, sound weights, nothing failed."""
    steps = run.of(events.StepFinished)
    total, rest = math.ceil(samples / BATCH) * EPOCHS, samples % BATCH or BATCH
    assert steps[-1].step == total
    assert finished.result is not None
    assert finished.result["steps"] == total
    assert finished.result["samples"] == samples * EPOCHS
    assert all(math.isfinite(step.loss) for step in steps)
    check_nothing_failed(run)
    for told in run.of(events.Staleness):
        assert told.acknowledged <= told.applied <= told.pushed, "an acknowledged update was lost"
    assert finished.run_dir is not None
    weights = load_file(RunDir(finished.run_dir).weights)
    assert all(np.isfinite(value).all() for value in weights.values())
    # A step's samples share one weight, so those of a short one count for more.
    usual, short = -EPOCHS, 1 - EPOCHS - BATCH / rest
    tally = weights["tally"]
    wrong = {n: float(seen) for n, seen in enumerate(tally) if min(abs(seen - usual), abs(seen - short)) > 1e-3}
    assert not wrong, f"{len(wrong)} samples not learnt from {EPOCHS} times: {dict(list(wrong.items())[:10])}"
    assert tally.sum() == pytest.approx(-BATCH * total, rel=1e-4)


def check_nothing_failed(run: Watch) -> None:
    """But for those that the test killed."""
    assert not run.of(events.WorkerFailed), run.it.report()
    assert len(run.of(events.RunFinished)) == 1


# --- staleness 0: the bits of a calm run


def test_workers_are_killed_at_every_place_of_a_step(calm_momentum: Calm, tmp_path: Path) -> None:
    """One after the other, each the one that took the last one's place. The server keeps its slices all along."""
    faults = [Fault("kill", 1, 4), Fault("kill", 3, 20, "collective"), Fault("kill", 4, 40, "update")]
    with begin(MOMENTUM, tmp_path, *SERVERS, faults=faults, workers="1:2") as run:
        run.until_members(0, 3, 2)
        run.until_members(0, 4, 2)
        run.until_fired(3)
        run.check(run.hurry(), calm_momentum, faults)


def test_all_workers_are_killed_and_the_server_computes_until_others_come(calm_momentum: Calm, tmp_path: Path) -> None:
    with begin(MOMENTUM, tmp_path, *SERVERS, *NEVER, workers="1:2") as run:
        run.until_step(3)
        run.kill(0, 1)
        run.until_many(3, without=[0, 1])
        run.check(run.hurry(), calm_momentum)


def test_killed_servers_without_state_cost_nothing(calm: Calm, tmp_path: Path) -> None:
    """The first at one place of a step; then, at another, the worker that serves since then."""
    faults = [Fault("kill", 2, 5, "collective"), Fault("kill", 1, 40, "update")]
    with begin(PLAIN, tmp_path, *SERVERS, *NEVER, faults=faults, workers="1:2") as run:
        run.until_many(3, without=[2])
        assert serving(run) == [1]
        run.until_fired(2)
        run.check(run.hurry(), calm, faults)


def test_killed_servers_with_state_cost_the_steps_since_the_last_checkpoint(
    calm_momentum: Calm, tmp_path: Path
) -> None:
    faults = [Fault("kill", 2, 15, "collective"), Fault("kill", 1, 45, "update")]
    with begin(MOMENTUM, tmp_path, *SERVERS, *SAVING, faults=faults, workers="1:2", pace_s=0.03) as run:
        run.until_many(3, without=[2])
        run.until_fired(2)
        assert check_went_back(run, run.hurry(), calm_momentum) == [10, 40]


@pytest.mark.parametrize("servers", ["1", "0"])
def test_a_killed_owner_of_the_only_state_ends_a_run_that_saves_nothing(servers: str, tmp_path: Path) -> None:
    """Told in one sentence, quickly."""
    with begin(MOMENTUM, tmp_path, *SERVERS, *NEVER, "--servers", servers, workers="1:2") as run:
        run.until_step(3)
        run.kill(1 if servers == "0" else 2)
        killed_s = time.monotonic()
        finished = run.wait(expect=22)
    assert time.monotonic() - killed_s < QUICKLY_S
    assert "UNI-2007  a parameter server was lost" in finished.output
    assert finished.output.count("UNI-") == 1, finished.output
    assert "Traceback" not in finished.output


def test_one_of_two_servers_is_killed_and_one_worker_with_it(calm_momentum: Calm, tmp_path: Path) -> None:
    with begin(MOMENTUM, tmp_path, *SERVERS, *SAVING, "--servers", "2", workers="1:2") as run:
        run.until_step(23)
        run.kill(1, 3)
        run.until_many(4, without=[1, 3])
        assert len(serving(run)) == 2
        back = check_went_back(run, run.hurry(), calm_momentum)
    assert back
    assert back[0] >= 20


def test_a_worker_that_owns_slices_is_killed(calm_momentum: Calm, tmp_path: Path) -> None:
    with begin(MOMENTUM, tmp_path, *SERVERS, *SAVING, "--servers", "0", workers="1:2") as run:
        run.until_step(23)
        run.kill(0)
        run.until_many(2, without=[0])
        back = check_went_back(run, run.hurry(), calm_momentum)
    assert len(back) == 1
    assert back[0] >= 20


def test_the_coordinator_is_killed_alone_with_a_worker_and_with_a_server(calm: Calm, tmp_path: Path) -> None:
    with begin(PLAIN, tmp_path, *SERVERS, workers="1:2") as run:
        run.until_step(3)
        run.kill_coordinator()
        run.until_step(run.step + 3)
        assert len(run.of(events.MembershipChanged)) == 1
        run.kill_coordinator()
        run.kill(1)
        run.until_members(0, 3, 2)
        run.kill_coordinator()
        run.kill(2)
        run.until_many(3, without=[1, 2])
        assert len(serving(run)) == 1
        run.check(run.hurry(), calm)


def test_a_server_that_stands_still_is_left_behind(calm: Calm, tmp_path: Path) -> None:
    with begin(PLAIN, tmp_path, *SERVERS, workers="1:2") as run:
        run.until_step(3)
        run.signal(2, signal.SIGSTOP)
        run.until(lambda: 2 not in run.members, "the others to go on")
        run.check(run.hurry(), calm)
        assert [event.who for event in run.of(events.WorkerRemoved) if event.how == "frozen"] == [2]


def test_a_server_that_hangs_is_named_and_left_behind(calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("hang", 2, 5, "update")]
    with begin(PLAIN, tmp_path, *SERVERS, "--hang-after", "4", faults=faults, workers="1:2") as run:
        run.until(lambda: run.members and 2 not in run.members, "the others to go on")
        run.check(run.hurry(), calm, faults)
        (removed,) = (event for event in run.of(events.WorkerRemoved) if event.how == "hung")
        assert removed.who == 2


@pytest.mark.parametrize("servers", ["1", "0"])
def test_the_run_is_scaled_and_a_worker_is_wanted_back(servers: str, calm_momentum: Calm, tmp_path: Path) -> None:
    """Whoever leaves in peace hands over what it holds: nothing is done again."""
    at_once = 2 + int(servers)
    with begin(MOMENTUM, tmp_path, *SERVERS, *NEVER, "--servers", servers, workers="1:2") as run:
        run.until_step(3)
        assert "from 2 to 3 workers" in run_command(tmp_path, "scale", "chaos", "3").output
        run.until_many(at_once + 1)
        run.until_step(run.step + 2)
        assert "from 3 to 1 workers" in run_command(tmp_path, "scale", "chaos", "1").output
        run.until_many(at_once - 1)
        run.until_step(run.step + 2)
        run_command(tmp_path, "scale", "chaos", "2")
        run.until_many(at_once)
        run.until_step(run.step + 2)
        leaving = next(worker for worker in run.members if worker not in serving(run))
        run.signal(leaving, signal.SIGTERM)
        run.until(lambda: leaving not in run.members, "the others to go on")
        run.check(run.hurry(), calm_momentum)
        removed = {event.who: event.how for event in run.of(events.WorkerRemoved)}
        assert removed[leaving] == "preempted"
        assert len(serving(run)) == int(servers)


def test_a_server_that_is_wanted_back_hands_over_its_slices(calm_momentum: Calm, tmp_path: Path) -> None:
    with begin(MOMENTUM, tmp_path, *SERVERS, *NEVER, workers="1:2") as run:
        run.until_step(3)
        run.signal(2, signal.SIGTERM)
        run.until(lambda: run.members and 2 not in run.members, "the others to go on")
        run.check(run.hurry(), calm_momentum)


def test_a_worker_that_is_ten_times_slower_changes_nothing(calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("slow", 0, 1, factor=10.0)]
    with begin(PLAIN, tmp_path, *SERVERS, faults=faults, workers=2, pace_s=0.004) as run:
        run.check(run.wait(), calm, faults)


# --- staleness: every update once


def test_a_loose_run_loses_no_update_when_workers_are_killed_and_one_is_slow(tmp_path: Path) -> None:
    faults = [Fault("slow", 0, 1, factor=10.0, until=20), Fault("kill", 1, 1), Fault("kill", 4, 21)]
    asked = ("--staleness", "2", *NEVER)
    with begin(MOMENTUM, tmp_path, *SERVERS, *asked, faults=faults, workers="1:3", pace_s=0.02) as run:
        run.until_fired(3)
        check_loose(run, run.hurry())


@pytest.mark.parametrize("staleness", ["2", "inf"])
def test_a_loose_run_waits_for_a_slow_worker_no_longer_than_it_must(staleness: str, tmp_path: Path) -> None:
    """Ten times slower for the whole run: the other does most of the work, and is never too far ahead."""
    faults = [Fault("slow", 0, factor=10.0)]
    with begin(PLAIN, tmp_path, *SERVERS, "--staleness", staleness, faults=faults, workers=2, pace_s=0.01) as run:
        finished = run.wait()
        check_loose(run, finished)
        leads = [(int(lead), count) for told in run.of(events.Staleness) for lead, count in told.leads.items()]
        assert sum(count for _, count in leads) == STEPS * 2, "each piece is begun once"
        assert 1 < max(lead for lead, _ in leads) <= float(staleness)
        in_lockstep_s = STEPS * 2 * 0.01 * 10
        assert sum(step.seconds for step in run.of(events.StepFinished)) < 0.75 * in_lockstep_s


@pytest.mark.parametrize("servers", ["2", "0"])
def test_a_loose_run_loses_no_update_when_an_owner_of_slices_is_killed(servers: str, tmp_path: Path) -> None:
    """It goes back to a checkpoint, and what is done again is done once; what was taken back is counted, and said. The
    new owners hold alike much."""
    asked = ("--staleness", "inf", *SAVING, "--servers", servers)
    with begin(LARGE_UNEVEN, tmp_path, *SERVERS, *asked, workers="1:2", pace_s=0.02) as run:
        run.until_step(21)
        run.kill(1 if servers == "0" else 2)
        run.until_many(2 + int(servers), without=run.killed)
        finished = run.hurry()
        check_loose(run, finished, samples=321)
        assert len(serving(run)) == int(servers)
    (notice,) = (event.text for event in run.of(events.Notice) if event.code == "slices-lost")
    (back,) = run.of(events.RolledBack)
    assert back.updates >= back.under_way + 2 * (back.step - back.to_step)
    assert notice.endswith(words := f"{back.updates} updates rolled back to the checkpoint of step {back.to_step}")
    told = run.of(events.Staleness)
    shown = " ".join(run_command(tmp_path, "show", "chaos").output.split())
    assert f"{sum(event.acknowledged for event in told) + back.under_way} acknowledged, " in shown
    assert f"none lost, {back.updates} rolled back to the checkpoint of step {back.to_step}" in shown
    assert words in shown, "in the story"
    held = told[-1].held
    assert len(held) == 2
    assert 0 < max(held.values()) <= 1.1 * min(held.values())


def test_a_loose_run_goes_on_while_the_coordinator_is_gone(tmp_path: Path) -> None:
    with begin(PLAIN, tmp_path, *SERVERS, "--staleness", "2", workers=2, pace_s=0.02) as run:
        run.until_step(1)
        run.kill_coordinator()
        run.until_step(run.step + 16)
        assert len(run.of(events.MembershipChanged)) == 1
        check_loose(run, run.hurry())


def test_a_loose_run_with_uneven_batches_loses_its_server_a_worker_and_the_coordinator(tmp_path: Path) -> None:
    asked = ("--staleness", "2", *SAVING)
    with begin(UNEVEN, tmp_path, *SERVERS, *asked, workers="1:3", pace_s=0.02) as run:
        run.until_step(21)
        run.kill(3, 0)
        run.kill_coordinator()
        run.until_many(4, without=run.killed)
        check_loose(run, run.hurry(), samples=321)


def test_a_loose_run_leaves_a_server_behind_that_stands_still(tmp_path: Path) -> None:
    faults = [Fault("freeze", 2, 17, "update"), Fault("freeze", 1, 17, seconds=0.5)]
    asked = ("--staleness", "inf", *SAVING)
    with begin(PLAIN, tmp_path, *SERVERS, *asked, faults=faults, workers="1:2", pace_s=0.02) as run:
        run.until_fired(2)
        run.until(lambda: 2 not in run.members, "the others to go on")
        check_loose(run, run.hurry())


def test_a_loose_run_leaves_a_server_behind_that_hangs(tmp_path: Path) -> None:
    faults = [Fault("hang", 2, 17, "update")]
    asked = ("--staleness", "2", "--hang-after", "4", *SAVING)
    with begin(PLAIN, tmp_path, *SERVERS, *asked, faults=faults, workers="1:2", pace_s=0.02) as run:
        run.until(lambda: run.members and 2 not in run.members, "the others to go on")
        check_loose(run, run.hurry())


def test_a_loose_run_puts_out_the_worker_whose_connections_are_silent_and_not_the_server(tmp_path: Path) -> None:
    faults = [Fault("drop", 1, 21)]
    asked = ("--staleness", "inf", "--hang-after", "4", *SAVING)
    with begin(MOMENTUM, tmp_path, *SERVERS, *asked, faults=faults, workers="1:2", pace_s=0.02) as run:
        run.until(lambda: run.members and 1 not in run.members, "the others to go on")
        check_loose(run, run.hurry())
        assert [event.who for event in run.of(events.WorkerRemoved)] == [1]


@pytest.mark.parametrize(("staleness", "servers"), [("inf", "1"), ("2", "0")])
def test_a_loose_run_is_scaled_and_a_worker_is_wanted_back(staleness: str, servers: str, tmp_path: Path) -> None:
    asked = ("--staleness", staleness, *NEVER, "--servers", servers)
    others = int(servers)
    with begin(MOMENTUM, tmp_path, *SERVERS, *asked, workers="1:3", pace_s=0.03) as run:
        run.until_step(16)
        assert "from 3 to 2 workers" in run_command(tmp_path, "scale", "chaos", "2").output
        run.until_many(2 + others)
        run.signal(0, signal.SIGTERM)
        run.until(lambda: 0 not in run.members, "the others to go on")
        set_pace(tmp_path, 0.1)
        run_command(tmp_path, "scale", "chaos", "3")
        run.until_many(3 + others)
        check_loose(run, run.hurry())
        assert len(serving(run)) == others


def test_a_loose_run_that_is_wanted_back_saves_and_goes_on_later(tmp_path: Path) -> None:
    asked = ("--staleness", "inf", *SAVING)
    with begin(MOMENTUM, tmp_path, *SERVERS, *asked, workers=2, pace_s=0.02) as run:
        run.until_step(16)
        os.kill(run.it.pid, signal.SIGTERM)
        finished = run.wait(expect=75)
    assert "UNI-4002  asked to leave by SIGTERM" in finished.output
    with begin(MOMENTUM, tmp_path, *SERVERS, *asked, workers=2, pace_s=0.0) as again:
        finished = again.wait()
        assert len(again.of(events.Resumed)) == 1
        again.events = again.events[len(run.events) :]
        check_loose(again, finished)


def test_a_group_without_momentum_does_not_hide_the_state_of_another(tmp_path: Path) -> None:
    """The first group keeps nothing from step to step; the second does, and it is lost with the server."""
    text = script().replace('[model.tally], "lr": float(BATCH)', '[model.tally], "lr": float(BATCH), "momentum": 0.5')
    with begin(text, tmp_path, *SERVERS, *NEVER, workers="1:2") as run:
        run.until_step(3)
        run.kill(2)
        finished = run.hurry(expect=None)
    assert finished.exit_code == 22, finished.output
    assert "UNI-2007" in finished.output
