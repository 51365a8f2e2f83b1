# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one mesh, taken up by any other: parameters and moments are equal, and the training goes on.

Each mesh saves once. Each then takes up what its two neighbours in the list have saved and stops at once, so that what
it saves is what it has read; the two must have the same hash. That all have saved the same numbers under the same
names, so that neighbours stand for all, is a test of its own.
"""

from __future__ import annotations

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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """By mesh: the run of its first steps."""
    found = {}
    for mesh in MESHES:
        folder = tmp_path_factory.mktemp("saved")
        finished = train(folder, mesh, "first", "--stop-after", str(AT))
        assert finished.run_dir is not None
        found[mesh] = finished
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("whole"), "dp=1", "whole")


def neighbours(mesh: str) -> tuple[str, str]:
    at = MESHES.index(mesh)
    return MESHES[at - 1], MESHES[(at + 1) % len(MESHES)]


@pytest.mark.parametrize("reading", MESHES)
def test_what_one_mesh_has_saved_another_takes_up(reading: str, folders: dict[str, Finished], tmp_path: Path) -> None:
    for writing in neighbours(reading):
        written = folders[writing]
        assert written.run_dir is not None
        step, before = saved(written.run_dir)
        assert step == AT
        name = writing.replace(",", "-").replace("=", "")
        store = str(written.run_dir / "checkpoints")
        again = train(tmp_path, reading, name, "--checkpoint-to", store, "--stop-after", str(AT))
        assert again.weights_sha256 == written.weights_sha256, (writing, reading)
        assert any(key.startswith("optimizer.") and key.endswith("exp_avg") for key in before)


def test_the_moments_are_equal_whoever_has_saved_them(folders: dict[str, Finished]) -> None:
    """All trained the same steps: to rounding, all saved the same numbers under the same names."""
    states = {mesh: saved(finished.run_dir)[1] for mesh, finished in folders.items() if finished.run_dir}
    first = states["dp=1"]
    for mesh, state in states.items():
        assert sorted(state) == sorted(first), mesh
        for name, value in state.items():
            assert value == pytest.approx(first[name], rel=1e-6, abs=1e-9), (mesh, name)


@pytest.mark.parametrize(("first", "second"), [("fsdp=2", "tp=2"), ("pp=2", "dp=2,fsdp=2"), ("dp=2,tp=2", "pp=2")])
def test_a_training_goes_on_under_another_mesh(first: str, second: str, whole: Finished, tmp_path: Path) -> None:
    train(tmp_path, first, "moved", "--stop-after", str(AT))
    moved = train(tmp_path, second, "moved")
    assert "mesh" in moved.output, "it is said that the mesh is another"
    assert moved.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)
    exported = run_command(tmp_path, "checkpoint", "export", "runs/moved", "plain.safetensors")
    assert exported.exit_code == 0
    assert run_command(tmp_path, "hash", "plain.safetensors").output.split()[0] == moved.weights_sha256
