# SPDX-License-Identifier: Apache-2.0
"""Gradients travel compressed between two hosts, encrypted, while a cable is cut and a host loses its power."""

from __future__ import annotations

from pathlib import Path

from chaos.joining import SCRIPT, Lab, check, removed, wait_for_members
from multiproc.running import run_unisono
from unisono.core import events

# What is shorter than 4 KB travels as it is.
WIDE = SCRIPT.replace(
    "nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)", "nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 2)"
)
CODEC = ("--compress", "int8")


def alone(folder: Path, *options: str) -> str:
    """The weights of a run on one host in which nothing happens."""
    folder.mkdir()
    (folder / "go").touch()
    return run_unisono(WIDE, folder, *options, workers=1, script_args=["go"]).weights_sha256


def test_a_codec_has_the_same_bits_when_a_host_is_cut_off_comes_back_and_loses_its_power(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone", *CODEC)
    assert expected != alone(tmp_path / "plain"), "nothing is compressed"
    with Lab(tmp_path, script=WIDE) as lab:
        b = lab.host("b")
        run = lab.run("--workers", "1:2", *CODEC)
        lab.join(b, run, "--workers", "1")
        wait_for_members(run, 0, 1)
        lab.net.link("b").cut()
        wait_for_members(run, 0, timeout_s=15)
        lab.net.link("b").mend()
        assert wait_for_members(run, 0, 1, timeout_s=20).healed == [1]
        run.wait_for_steps(len(run.events_of(events.StepFinished)) + 1)  # of both together
        b.power_off(reset=True)
        wait_for_members(run, 0, timeout_s=15)
        lab.go()
        finished = check(run, expected)
        assert removed(finished) == [(1, "b", "unreachable"), (1, "b", "unreachable")]
        assert lab.left_on(lab.a) == []
