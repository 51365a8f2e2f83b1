# SPDX-License-Identifier: Apache-2.0
"""Codes between replicas of several ranks: each rank has its own, and what they have not said yet stays with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import Finished, run_unisono
from multiproc.test_meshes import FOUR, SCRIPT

IN_FLOAT32 = SCRIPT.read_text().replace("torch.set_default_dtype(torch.float64)", "pass")
AT = 3  # of 6 steps


def train(
    folder: Path, mesh: str, codec: str, *options: str, arguments: tuple[str, ...] = (), expect: int = 0
) -> Finished:
    asked = ("--mesh", mesh, *FOUR, "--compress", codec, *options)
    return run_unisono(IN_FLOAT32, folder, *asked, workers=None, script_args=arguments, timeout_s=120, expect=expect)


def test_the_number_of_replicas_does_not_show_in_the_bits(tmp_path: Path) -> None:
    found = {dp: train(tmp_path, f"dp={dp},fsdp=2", "int8").weights_sha256 for dp in (2, 3)}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(("inner", "codec"), [("fsdp=2", "onebit"), ("tp=2", "topk:0.05"), ("pp=2", "powersgd:2")])
def test_a_resumed_run_goes_on_with_what_each_rank_had_not_sent_yet(inner: str, codec: str, tmp_path: Path) -> None:
    """On another number of replicas, too."""
    calm = train(tmp_path, f"dp=2,{inner}", codec)
    train(tmp_path, f"dp=2,{inner}", codec, "--name", "stopped", "--stop-after", str(AT))
    resumed = train(tmp_path, f"dp=3,{inner}", codec, "--name", "stopped")
    assert resumed.weights_sha256 == calm.weights_sha256


def test_weights_that_several_stages_share_cannot_be_coded_alike_and_that_is_said(tmp_path: Path) -> None:
    asked = ("--mesh", "dp=2,pp=2", *FOUR, "--compress", "int8")
    refused = run_unisono(IN_FLOAT32, tmp_path, *asked, workers=None, script_args=("tied",), expect=11)
    assert "weights that several stages share do not go together yet" in refused.output
