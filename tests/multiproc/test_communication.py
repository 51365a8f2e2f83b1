# SPDX-License-Identifier: Apache-2.0
"""How gradients travel, as a user asks for it: any exact algorithm has the same bits, and so has each codec."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import run_command, run_unisono
from multiproc.scripts import SMALL
from unisono.core import events
from unisono.core.faults import Fault, FaultPlan

# Large enough for codes and algorithms to matter: buckets of 17,000 elements and more.
SCRIPT = (
    SMALL
    + """
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))
fit(net, max_steps=12)
"""
)
OPTIONS = ("--microbatches", "5")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_unisono(SCRIPT, tmp_path_factory.mktemp("alone"), *OPTIONS, workers=1).weights_sha256


@pytest.mark.parametrize("name", ["direct", "tree", "double-tree", "halving", "hierarchical"])
def test_every_exact_algorithm_gives_the_same_bits(name: str, alone: str, tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, *OPTIONS, "--comm", name, workers=3)
    assert finished.weights_sha256 == alone


def test_the_autopilot_says_what_it_chose_and_why_and_changes_no_bit(alone: str, tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, *OPTIONS, workers=3)
    assert finished.weights_sha256 == alone
    (chosen,) = finished.events_of(events.CommChosen)
    assert chosen.algorithms
    assert chosen.because.keys() == chosen.algorithms.keys()
    assert "\ncomm  " in finished.output
    assert "slowest link" not in finished.output, "on one host, chance decides which that is"
    shown = run_command(tmp_path, "show", str(finished.run_dir)).output
    assert any(name in shown for name in chosen.algorithms.values())


def test_one_line_says_how_tensors_travel_unless_nobody_else_is_there(tmp_path: Path) -> None:
    together = run_unisono(SCRIPT, tmp_path, *OPTIONS, workers=2)
    assert "\ntensors travel through shared memory\n" in together.output
    alone = run_unisono(SCRIPT, tmp_path, *OPTIONS, workers=1)
    assert "tensors travel" not in alone.output


def test_gloo_carries_the_same_bits_and_a_death_does_not_change_them(alone: str, tmp_path: Path) -> None:
    """What is taken where there is no mesh, asked for here."""
    (tmp_path / "plan.toml").write_text(FaultPlan((Fault("kill", 1, 4, "collective"),)).as_toml())
    killed = ("--backend", "gloo", "--faults", "plan.toml", "--max-restarts", "0")
    finished = run_unisono(SCRIPT, tmp_path, *OPTIONS, *killed, workers="1:3")
    assert "\ntensors travel by gloo, not encrypted (--backend gloo)\n" in finished.output
    assert [event.fault for event in finished.events_of(events.FaultFired)] == ["kill"]
    assert [event.members for event in finished.events_of(events.MembershipChanged)] == [[0, 1, 2], [0, 2]]
    assert finished.weights_sha256 == alone


def test_gloo_carries_what_replicas_of_several_ranks_add_up(tmp_path: Path) -> None:
    """The first ranks of all replicas meet by themselves, and so do the second ones."""
    found = {
        run_unisono(SCRIPT, tmp_path, "--mesh", "dp=2,fsdp=2", "--backend", name, workers=None).weights_sha256
        for name in ("mesh", "gloo")
    }
    assert len(found) == 1


@pytest.mark.parametrize("name", ["ring", "backend"])
def test_an_algorithm_that_cannot_keep_the_order_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, *OPTIONS, "--comm", name, workers=2, expect=None)
    assert finished.exit_code != 0
    assert f"{name} cannot be used here" in finished.output
    assert "exact=False" in finished.output


@pytest.mark.parametrize("codec", ["int8:stochastic", "clip:1.0+topk:0.05"])
def test_a_codec_gives_the_same_bits_on_any_number_of_workers(codec: str, alone: str, tmp_path: Path) -> None:
    hashes = {
        run_unisono(SCRIPT, tmp_path, *OPTIONS, "--compress", codec, workers=workers).weights_sha256
        for workers in (1, 3)
    }
    assert len(hashes) == 1
    assert alone not in hashes, "nothing was compressed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compress", "int9"), "did you mean 'int8'"),
        (("--compress", "int8", "--comm", "tree"), "codes cannot be added on their way"),
        (("--local-steps", "4"), "--local-steps cannot take effect"),
        (("--fragments", "2"), "it belongs to the strategy local"),
        (("--backend", "gloo", "--listen", "127.0.0.1"), "reaches nobody on another machine; leave out --listen"),
        (("--backend", "gloo", "--strategy", "ps"), "does not carry what servers are asked; leave out --strategy ps"),
        (("--backend", "glo"), "'mesh' or 'gloo'"),
    ],
)
def test_what_cannot_take_effect_is_refused(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, *options, workers=2, expect=None)
    assert finished.exit_code != 0
    assert said in finished.output
