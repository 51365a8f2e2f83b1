# SPDX-License-Identifier: Apache-2.0
"""``--compress auto`` as a user asks for it: what it chose and why is told, shown and drawn, no bits are promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import run_command, run_unisono
from multiproc.scripts import SMALL
from unisono.core import events

SCRIPT = (
    SMALL
    + """
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))
fit(net, max_steps=12)
"""
)


def test_the_choice_and_its_reason_are_told_shown_and_drawn(tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, "--compress", "auto", workers=2, timeout_s=60)
    (chosen,) = finished.events_of(events.CodecsChosen)
    assert chosen.codecs.keys() == chosen.because.keys() == chosen.predicted_s.keys() == {"0"}
    assert chosen.bytes["0"] > 4096
    assert all(chosen.because.values())
    assert chosen.predicted_s["0"].keys() == {"none", "bf16", "int8", "int4:stochastic"}
    assert f"\ncompress {chosen.codecs['0']} for 1 bucket" in finished.output
    assert "not exact: bits depend on codecs chosen by measurement" in finished.output
    assert finished.run_dir is not None
    shown = run_command(tmp_path, "show", str(finished.run_dir)).output
    assert f"{chosen.codecs['0']} for 1 bucket" in shown
    assert chosen.because["0"] in shown
    assert "codecs.svg" in shown
    assert "in use" in (finished.run_dir / "codecs.svg").read_text()


def test_alone_nothing_travels_and_so_nothing_is_compressed(tmp_path: Path) -> None:
    hashes = {
        run_unisono(SCRIPT, tmp_path, "--compress", codec, workers=1, timeout_s=60).weights_sha256
        for codec in ("auto", "none")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--comm", "tree"), "--comm tree cannot take effect with --compress auto"),
        (("--strategy", "local"), "--compress auto cannot take effect with local steps"),
    ],
)
def test_what_auto_cannot_do_is_refused_with_the_reason(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, "--compress", "auto", *options, workers=2, expect=None, timeout_s=60)
    assert finished.exit_code != 0
    assert said in finished.output
    assert "do " in finished.output
    assert not finished.events_of(events.StepFinished)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("fit(net.double(), max_steps=2)", "codecs are for float32"),
        ("fit(net, max_steps=2, exact=False)", "exact=False has no use with --compress auto"),
    ],
)
def test_a_script_that_leaves_nothing_to_choose_is_refused(change: str, said: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("fit(net, max_steps=12)", change)
    finished = run_unisono(script, tmp_path, "--compress", "auto", workers=1, expect=None, timeout_s=60)
    assert finished.exit_code != 0
    assert said in finished.output
