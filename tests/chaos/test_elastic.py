# SPDX-License-Identifier: Apache-2.0
"""Runs that grow, shrink, wait, end and are healed: by command, by signal, by their limits, and with any model.

What may happen to the workers of a run without changing what it comes to, and what ends it, with which words.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chaos.recovering import BEGINNING, SCRIPT, Calm, begin, calm_run, set_pace
from multiproc.running import run_command
from unisono.core import events
from unisono.core.faults import Fault

SLOW_S = 0.15
OPTIMIZER = """
groups = [{"params": model.net.parameters(), "momentum": 0.9}, {"params": [model.tally], "lr": float(BATCH)}]
optimizer = torch.optim.SGD(groups, lr=0.05)
"""
# Frozen parts that thaw, a batch norm that stops to learn, a callback with a memory, a schedule, loader processes.
CHANGING = (
    BEGINNING
    + """
class Thaw(unisono.Callback):
    def on_start(self, trainer):
        self.net, self.seen = trainer.model.net, 0
        self.net[0].requires_grad_(False)

    def on_step(self, info):
        self.seen += 1
        if self.seen == 5:
            self.net[0].requires_grad_(True)
            self.net[1].eval()

    def on_epoch(self, info):
        if info.is_first_worker:
            print("epoch", info.epoch, "after", self.seen)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


model = Tallied(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)))
"""
    + OPTIMIZER
    + """
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.99**n, lambda n: 1.0])
unisono.Trainer(
    model, optimizer, objective=objective, data=unisono.Data(DATA, loader_processes=1), batch_size=BATCH,
    epochs=2, schedule=schedule, callbacks=[Thaw()], eval_data=torch.utils.data.Subset(DATA, range(64)),
).fit()
"""
)
SYNCHRONISED = (
    BEGINNING
    + """
model = Tallied(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)))
"""
    + OPTIMIZER
    + """
unisono.Trainer(
    model, optimizer, objective=objective, data=DATA, batch_size=BATCH, epochs=2, batch_norm="synchronised"
).fit()
"""
)
LBFGS = (
    BEGINNING
    + """
def loss(outputs, targets):
    keep_pace()
    return nn.functional.cross_entropy(outputs, targets)


model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)
data = torch.utils.data.TensorDataset(*DATA.tensors[:2])
unisono.Trainer(model, optimizer, loss=loss, data=data, batch_size=BATCH, max_steps=60).fit()
"""
)
# What a script does after a step and after an epoch is its own; with `travels`, joiners have what came of it.
OWN_LOOP = (
    BEGINNING
    + """
model = Tallied(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)))
"""
    + OPTIMIZER
    + """
each_step = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n / 50), lambda n: 1.0])


class Momentum:
    epochs = 0

    def step(self):
        self.epochs += 1
        optimizer.param_groups[0]["momentum"] = 0.9 / (1 + self.epochs)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


each_epoch = Momentum()
loader = torch.utils.data.DataLoader(DATA, batch_size=BATCH, shuffle=True)
run, batches = unisono.attach(model, optimizer, loader, travels={"step": each_step, "epoch": each_epoch})
for epoch in range(3):
    for batch in batches:
        run.backward(objective(model, batch))
        if run.step():
            each_step.step()
    each_epoch.step()
run.finish(epochs=each_epoch.epochs)
"""
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return calm_run(SCRIPT, tmp_path_factory.mktemp("calm"))


def test_a_run_is_scaled_up_and_down_and_stopped_by_command(calm: Calm, tmp_path: Path) -> None:
    with begin(SCRIPT, tmp_path, "--local", "1") as run:
        run.until_members(0)
        assert "from 1 to 4 workers" in run_command(tmp_path, "scale", "chaos", "4").output
        run.until_members(0, 1, 2, 3)
        assert "from 4 to 2 workers" in run_command(tmp_path, "scale", "chaos", "2").output
        run.until_members(0, 1)
        refused = run_command(tmp_path, "scale", "chaos", "5", expect=2).output
        assert "this run can have 1 to 4" in refused
        run.until_step(run.step + 3)
        assert "the step in hand is the last" in run_command(tmp_path, "stop", "chaos").output
        finished = run.wait()
    steps = [step.loss for step in run.of(events.StepFinished)]
    assert steps == calm.losses[: len(steps)]
    assert finished.result is not None
    assert finished.result["steps"] == len(steps) < len(calm.losses)
    assert finished.result["stopped_early"] == "stopped by unisono stop"
    left = {event.who: event.how for event in run.of(events.WorkerRemoved)}
    assert left == {2: "left", 3: "left"}
    assert {event.worker: event.exit_code for event in run.of(events.WorkerExited)} == {0: 0, 1: 0, 2: 75, 3: 75}


def test_below_the_minimum_a_run_waits_and_goes_on_where_it_was(calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("kill", 1, 6, "collective"), Fault("hang", 2, 1, "start", seconds=2)]
    with begin(SCRIPT, tmp_path, faults=faults, workers="2:2") as run:
        run.until_fired(2)
        run.until_members(0, 2)
        [notice] = [event.text for event in run.of(events.Notice) if event.code == "too-few-workers"]
        assert notice == "1 of at least 2 workers are left; it goes on when another has started"
        run.check(run.hurry(), calm, faults)
        assert [event.members for event in run.of(events.MembershipChanged)] == [[0, 1], [0, 2]]


def test_a_run_that_waits_in_vain_says_for_whom_and_how_long(tmp_path: Path) -> None:
    faults = [Fault("kill", 1, 6), Fault("hang", 2, 1, "start")]
    with begin(SCRIPT, tmp_path, "--rejoin-within", "0.3", faults=faults, workers="2:2") as run:
        output = run.wait(expect=20).output
    assert "UNI-2005  1 workers are left, and the run needs at least 2" in output
    assert "waited" in output
    assert "--rejoin-within" in output
    assert run.step == 6, "the step in hand is finished, and saved"
    assert [event.step for event in run.of(events.CheckpointSaved)] == [6]


def test_restarts_are_limited_and_the_last_worker_goes_on_alone(calm: Calm, tmp_path: Path) -> None:
    faults = [Fault("kill", 0, 6)]
    with begin(SCRIPT, tmp_path, "--max-restarts", "1", faults=faults, workers="1:2") as run:
        run.until_fired(1)
        set_pace(tmp_path, SLOW_S)
        run.until_members(1, 2)
        run.kill(1)
        run.until_members(2)
        run.check(run.hurry(), calm, faults)
        assert sorted(run.pids) == [0, 1, 2]


def test_the_death_of_all_is_the_end_and_says_so(tmp_path: Path) -> None:
    faults = [Fault("kill", worker, 6, "collective") for worker in (0, 1)]
    with begin(SCRIPT, tmp_path, faults=faults, workers="1:2") as run:
        output = run.wait(expect=20).output
    assert "UNI-2005  every worker that held the training's state is gone" in output
    assert "they were lost before another could copy it; the last: ended by SIGKILL" in output
    assert run.step == 5


def test_two_deaths_at_one_place_of_the_script_are_no_accident(tmp_path: Path) -> None:
    """Whoever comes to that line dies in it, and the first worker never does."""
    script = SCRIPT.replace("    keep_pace()\n    inputs", "    keep_pace()\n    fall_over()\n    inputs") + ""
    script = script.replace(
        "def objective",
        """
def fall_over():
    if current().worker and current().activity.step > 5:
        os.abort()


def objective""",
    ).replace("import sys\n", "import os\nimport sys\nfrom unisono.train.context import current\n")
    with begin(script, tmp_path, workers="1:2") as run:
        output = run.wait(expect=10).output
    assert "UNI-2004  workers 1 and 2 died at the same place: ended by SIGABRT" in output
    assert "fall_over: os.abort()" in output
    assert "two workers, one place: a fault in the script or in a library" in output


def test_a_worker_that_is_asked_to_leave_goes_after_its_step(calm: Calm, tmp_path: Path) -> None:
    with begin(SCRIPT, tmp_path, workers="1:3") as run:
        run.until_step(6)
        for worker, number in ((0, signal.SIGTERM), (2, signal.SIGUSR1)):
            run.signal(worker, number)
            left = run.until_gone(worker)
            assert (left.exit_code, left.expected) == (75, True)
        run.until_members(1)
        run.check(run.hurry(), calm)
        removed = [(event.who, event.how) for event in run.of(events.WorkerRemoved)]
        assert removed == [(0, "preempted"), (2, "preempted")]
        assert sorted(run.pids) == [0, 1, 2], "nobody takes the place of one that is not wanted here"


def test_a_run_that_is_asked_to_leave_finishes_its_step_and_saves(calm: Calm, tmp_path: Path) -> None:
    with begin(SCRIPT, tmp_path, workers=2) as run:
        run.until_step(6)
        run.it.send(signal.SIGTERM)
        finished = run.wait(expect=75)
    losses = [step.loss for step in run.of(events.StepFinished)]
    assert losses == calm.losses[: len(losses)]
    assert finished.result is not None
    assert finished.result["steps"] == len(losses)
    assert f"UNI-4002  asked to leave by SIGTERM: stopped after step {len(losses)}, weights saved" in finished.output
    assert finished.run_dir is not None
    assert (finished.run_dir / "final.safetensors").exists()


@pytest.mark.parametrize(
    ("script", "early", "late"),
    [(CHANGING, 8, 70), (SYNCHRONISED, 8, 20), (LBFGS, 8, 12), (OWN_LOOP, 8, 130)],
    ids=["changing", "synchronised batch norm", "LBFGS", "own loop"],
)
def test_a_joiner_alone_finishes_what_others_began(script: str, early: int, late: int, tmp_path: Path) -> None:
    """Worker 0 dies in a collective, worker 2 takes its place much later, then worker 1 dies: only a copy is left."""
    (tmp_path / "calm").mkdir()
    calm = calm_run(script, tmp_path / "calm")
    faults = [Fault("kill", 0, early, "collective")]
    with begin(script, tmp_path, "--max-restarts", "1", faults=faults, workers="1:2", pace_s=0.01) as run:
        run.until_members(1)
        set_pace(tmp_path, 0.0)
        run.until_step(late)
        set_pace(tmp_path, SLOW_S)
        run.until_members(1, 2)
        run.until_step(run.step + 2)
        run.kill(1)
        run.until_members(2)
        run.check(run.hurry(), calm, faults)


def test_initial_weights_are_shared_even_if_their_giver_dies(tmp_path: Path) -> None:
    """Every worker builds others. Worker 0 dies while it gives its own to the rest, before the first step."""
    script = SCRIPT.replace("torch.manual_seed(2)", "torch.manual_seed(time.time_ns())")
    faults = [Fault("kill", 0, 1, "heal")]
    with begin(script, tmp_path, "--verify-every", "1", "--max-restarts", "0", faults=faults, workers="1:3") as run:
        finished = run.hurry()
    assert [event.fault for event in run.of(events.FaultFired)] == ["kill"]
    [formed] = run.of(events.MembershipChanged)
    assert (formed.members, formed.healed) == ([1, 2], [2])
    assert [step.step for step in run.of(events.StepFinished)] == list(range(1, 301))
    assert finished.result is not None
    assert finished.result["workers"] == 2
