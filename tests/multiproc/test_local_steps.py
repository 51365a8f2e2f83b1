# SPDX-License-Identifier: Apache-2.0
"""Local SGD and DiLoCo on real workers: the same bits on any number of them, also when one dies in a round."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from multiproc.running import Finished, run_python, run_unisono
from unisono.core import events
from unisono.core.faults import Fault, FaultPlan
from unisono.core.run_dir import RunDir

# 77 samples in batches of 8 are 10 batches an epoch, the last with 5 samples; in rounds of 3 they are 4 rounds, the
# last of one turn. Four replicas: each update is made from two samples, in that last turn from one or two.
SCRIPT = """
import torch
from torch import nn

import unisono
from unisono import LocalSteps

torch.manual_seed(1)
inputs = torch.randn(77, 6)
DATA = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())


def fit(local, optimizer=torch.optim.SGD, norm=nn.Identity(), width=12, **changes):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, width), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2))
    changes = {"data": DATA, "loss": nn.functional.cross_entropy, "batch_size": 8, "epochs": 2} | changes
    made = optimizer(model.parameters(), lr=0.05)
    if "schedule" in changes:
        changes["schedule"] = changes["schedule"](made)
    return unisono.Trainer(model, made, local=local, **changes).fit()


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


DILOCO = LocalSteps(h=3, outer="nesterov")
BATCH_NORM = {"norm": nn.BatchNorm1d(12), "data": unisono.Data(DATA, drop_last=True), "eval_data": DATA}
"""
ADAM = "\nfit(DILOCO, torch.optim.Adam, clip=unisono.Clip(norm=0.5), **BATCH_NORM)"
SGD = "\nfit(LocalSteps(h=3), epochs=3)"
ASKED = ("--microbatches", "4")


def losses(finished: Finished) -> list[float]:
    return [event.loss for event in finished.events_of(events.StepFinished)]


@pytest.mark.parametrize("local", ["DILOCO", "LocalSteps(h=3, inner_state='average')", "LocalSteps(h=3, fragments=3)"])
def test_the_weights_and_losses_are_the_same_on_any_number_of_workers(local: str, tmp_path: Path) -> None:
    text = ADAM.replace("DILOCO", local)
    alone = run_python(SCRIPT + text, tmp_path, env={"UNISONO_MICROBATCHES": "4"})
    assert len(losses(alone)) == 6, "two epochs of 9 whole batches, in rounds of 3"
    for workers in (2, 3):
        finished = run_unisono(SCRIPT + text, tmp_path, *ASKED, workers=workers)
        assert losses(finished) == losses(alone)
        norms = [[event.grad_norm for event in run.events_of(events.StepFinished)] for run in (finished, alone)]
        assert norms[0] == norms[1]
        assert finished.weights_sha256 == alone.weights_sha256


@pytest.mark.parametrize("fragments", [1, 3])
def test_compressed_differences_give_the_same_bits_too(fragments: int, tmp_path: Path) -> None:
    asked = f"LocalSteps(h=3, outer='nesterov', fragments={fragments})"
    text = SCRIPT + f"\nfit({asked}, torch.optim.Adam, width=2000)"
    plain = run_python(text, tmp_path, env={"UNISONO_MICROBATCHES": "4"})
    found = {run_unisono(text, tmp_path, *ASKED, "--compress", "onebit", workers=n).weights_sha256 for n in (1, 3)}
    assert len(found) == 1
    assert found != {plain.weights_sha256}, "nothing was compressed"


def test_the_command_asks_for_local_steps_as_the_script_does(tmp_path: Path) -> None:
    by_script = run_unisono(SCRIPT + "\nfit(LocalSteps(h=4, outer='nesterov', fragments=2))", tmp_path, *ASKED)
    words = ("--strategy", "local", "--local-steps", "4", "--outer", "nesterov", "--fragments", "2")
    by_command = run_unisono(SCRIPT + "\nfit(None)", tmp_path, *ASKED, *words)
    assert by_command.weights_sha256 == by_script.weights_sha256
    assert run_unisono(SCRIPT + "\nfit(None)", tmp_path, *ASKED, *words[:-2]).weights_sha256 != by_script.weights_sha256


def test_a_round_counts_its_true_samples_and_schedules_follow_rounds(tmp_path: Path) -> None:
    text = "\nfit(LocalSteps(h=3), schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1))"
    finished = run_python(SCRIPT + text, tmp_path, env={"UNISONO_MICROBATCHES": "4"})
    steps = finished.events_of(events.StepFinished)
    assert [step.samples for step in steps] == [24, 48, 72, 77, 101, 125, 149, 154]
    assert [step.lr for step in steps] == pytest.approx([0.05, 0.05, 5e-3, 5e-3, 5e-4, 5e-4, 5e-5, 5e-5])


def test_one_local_step_with_plain_averaging_is_synchronous_sgd(tmp_path: Path) -> None:
    """Up to rounding: each replica rounds its own weights, all-reduce rounds one sum of gradients."""
    env = {"UNISONO_MICROBATCHES": "4"}
    local = run_python(SCRIPT + "\nfit(LocalSteps(h=1))", tmp_path, env=env)
    synchronous = run_python(SCRIPT + "\nfit(None)", tmp_path, env=env)
    assert losses(local)[0] == losses(synchronous)[0], "the same samples, the same random state"
    assert losses(local) == pytest.approx(losses(synchronous), rel=1e-5)
    assert len(losses(local)) == 20
    one, other = (load_file(RunDir(run.run_dir).weights) for run in (local, synchronous) if run.run_dir)
    for name, value in one.items():
        assert value == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("at", ["forward", "collective", "update"])
def test_a_worker_killed_in_a_round_changes_no_bit(at: str, tmp_path: Path) -> None:
    calm = run_python(SCRIPT + SGD, tmp_path, env={"UNISONO_MICROBATCHES": "4"})
    (tmp_path / "plan.toml").write_text(FaultPlan((Fault("kill", 1, 5, at),)).as_toml())
    finished = run_unisono(SCRIPT + SGD, tmp_path, *ASKED, "--faults", "plan.toml", workers="1:3")
    assert [event.fault for event in finished.events_of(events.FaultFired)] == ["kill"]
    assert losses(finished) == losses(calm)
    assert finished.weights_sha256 == calm.weights_sha256
    assert not [event for event in finished.events_of(events.Notice) if event.code == "carried-lost"]


def test_a_death_costs_the_momentum_of_its_replicas_and_is_told_in_one_line(tmp_path: Path) -> None:
    text = SCRIPT + "\nfit(LocalSteps(h=3), momentum, epochs=3)"
    (tmp_path / "plan.toml").write_text(FaultPlan((Fault("kill", 1, 5),)).as_toml())
    finished = run_unisono(text, tmp_path, *ASKED, "--faults", "plan.toml", "--max-restarts", "0", workers="1:3")
    assert len(losses(finished)) == 12
    (notice,) = (event for event in finished.events_of(events.Notice) if event.code == "carried-lost")
    assert "optimizer" in notice.text
    assert "goes on" in notice.text


def test_a_run_that_was_stopped_goes_on_with_other_workers_to_the_same_bits(tmp_path: Path) -> None:
    calm = run_python(SCRIPT + ADAM, tmp_path, env={"UNISONO_MICROBATCHES": "4"})
    named = (*ASKED, "--name", "r")
    run_unisono(SCRIPT + ADAM, tmp_path, *named, "--stop-after", "4", workers=2)
    resumed = run_unisono(SCRIPT + ADAM, tmp_path, *named, workers=3)
    assert [event.step for event in resumed.events_of(events.Resumed)] == [4]
    assert resumed.weights_sha256 == calm.weights_sha256


def test_the_line_that_made_a_loss_not_finite_is_found_in_the_turn_where_it_happened(tmp_path: Path) -> None:
    """The weights of the round's start are good: only after two local updates is a negative number's root taken."""
    text = """

def objective(model, batch):
    moved = (model.weight - start).abs().max()
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) + torch.sqrt(0.05 - moved)


model = nn.Linear(6, 2)
start = model.weight.detach().clone()
unisono.Trainer(
    model, torch.optim.Adam(model.parameters(), lr=0.03), objective=objective, data=DATA, batch_size=8, epochs=1,
    local=LocalSteps(h=3),
).fit()
"""
    finished = run_python(SCRIPT + text, tmp_path, env={"UNISONO_MICROBATCHES": "4"}, expect=None)
    assert finished.exit_code != 0
    assert "the loss is nan at step 1, microbatch 0" in finished.output
    assert "in objective: return nn.functional.cross_entropy" in finished.output


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ('fit(DILOCO, norm=nn.BatchNorm1d(12), batch_norm="synchronised")', "exclude each other"),
        ("fit(DILOCO, lambda p, lr: torch.optim.LBFGS(p, lr=lr))", "LBFGS cannot make local steps"),
        ("LocalSteps(h=3, outer='nestorov')", "nesterov"),
    ],
)
def test_what_cannot_be_done_locally_is_refused_with_the_reason(asked: str, words: str, tmp_path: Path) -> None:
    finished = run_python(SCRIPT + asked, tmp_path, expect=None)
    assert finished.exit_code != 0
    assert words in finished.output
