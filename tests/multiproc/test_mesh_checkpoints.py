# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one mesh, taken up by any other: parameters and moments are equal, and the training goes on.

Each mesh saves once. Each then takes up what each other has saved and stops at once, so that what it saves is what it
has read; the two must be equal, tensor by tensor.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from multiproc.running import Finished, run_command, run_unisono
from multiproc.test_meshes import FOUR, SCRIPT
from unisono.checkpoint.listing import newest_good
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.store import open_store

MESHES = ("dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2,tp=2")
AT = 3  # of 6 steps


def train(folder: Path, mesh: str, name: str, *options: str) -> Finished:
    asked = ("--mesh", mesh, *FOUR, "--name", name, *options)
    return run_unisono(SCRIPT, folder, *asked, workers=None, script_args=("tied",), timeout_s=120)


def saved(run_dir: Path) -> tuple[int, dict[str, np.ndarray]]:
    store = open_store(str(run_dir / "checkpoints"))
    found = newest_good(store, lambda _, error: pytest.fail(str(error)), None)
    assert found is not None
    return found.step, {name: tensor.numpy() for name, tensor in read_tensors(store, found, list(found.tensors), None)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By mesh: the run of its first steps."""
    found = {}
    for mesh in MESHES:
        folder = tmp_path_factory.mktemp("saved")
        finished = train(folder, mesh, "first", "--stop-after", str(AT))
        assert finished.run_dir is not None
        found[mesh] = finished.run_dir
    return found


@pytest.mark.parametrize("reading", MESHES)
def test_what_one_mesh_has_saved_every_other_takes_up(reading: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for writing, run_dir in folders.items():
        if writing == reading:
            continue
        step, before = saved(run_dir)
        assert step == AT
        name = writing.replace(",", "-").replace("=", "")
        train(tmp_path, reading, name, "--checkpoint-to", str(run_dir / "checkpoints"), "--stop-after", str(AT))
        weights = run_command(tmp_path, "hash", str(run_dir)).output.split()[0]
        again = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        assert again["weights_sha256"] == weights, (writing, reading)
        assert any(key.startswith("optimizer.") and key.endswith("exp_avg") for key in before)


def test_the_moments_are_equal_whoever_has_saved_them(folders: dict[str, Path]) -> None:
    """All trained the same steps: to rounding, all saved the same numbers under the same names."""
    states = {mesh: saved(run_dir)[1] for mesh, run_dir in folders.items()}
    first = states["dp=1"]
    for mesh, state in states.items():
        assert sorted(state) == sorted(first), mesh
        for name, value in state.items():
            assert value == pytest.approx(first[name], rel=1e-6, abs=1e-9), (mesh, name)


@pytest.mark.parametrize(("first", "second"), [("fsdp=2", "tp=2"), ("pp=2", "dp=2,fsdp=2"), ("dp=2,tp=2", "pp=2")])
def test_a_training_goes_on_under_another_mesh(first: str, second: str, tmp_path: Path) -> None:
    whole = train(tmp_path, "dp=1", "whole")
    train(tmp_path, first, "moved", "--stop-after", str(AT))
    moved = train(tmp_path, second, "moved")
    assert "mesh" in moved.output, "it is said that the mesh is another"
    assert moved.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)
    exported = run_command(tmp_path, "checkpoint", "export", "runs/moved", "plain.safetensors")
    assert exported.exit_code == 0
    assert run_command(tmp_path, "hash", "plain.safetensors").output.split()[0] == moved.weights_sha256
