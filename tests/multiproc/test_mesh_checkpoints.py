# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one mesh, taken up by any other: parameters and moments are equal, and the training goes on.

Each mesh saves once. Each then takes up what every other has saved and saves it again at once: what it has read and
what it has written are compared byte by byte. From the last of them it goes on to the end of the training.
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
TAKING_UP = Path(__file__).with_name("taking_up.py")


def train(folder: Path, mesh: str, name: str, *options: str, script: Path = SCRIPT) -> Finished:
    asked = ("--mesh", mesh, *FOUR, "--name", name, *options)
    return run_unisono(script, folder, *asked, workers=None, script_args=("tied",), timeout_s=120)


def saved(place: Path) -> dict[str, np.ndarray]:
    store = open_store(str(place))
    found = newest_good(store, lambda _, error: pytest.fail(str(error)), None)
    assert found is not None
    assert found.step == AT
    return {name: tensor.numpy() for name, tensor in read_tensors(store, found, list(found.tensors), None)}


def exactly(value: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), value.shape, value.tobytes()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By mesh: what it has saved after the first steps."""
    found = {}
    for mesh in MESHES:
        finished = train(tmp_path_factory.mktemp("saved"), mesh, "first", "--stop-after", str(AT))
        assert finished.run_dir is not None
        found[mesh] = finished.run_dir / "checkpoints"
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("whole"), "dp=1", "whole")


@pytest.mark.parametrize("reading", MESHES)
def test_what_one_mesh_has_saved_every_other_takes_up_and_saves_alike(
    reading: str, stores: dict[str, Path], whole: Finished, tmp_path: Path
) -> None:
    ways = {mesh: (stores[mesh], tmp_path / f"again-{number}") for number, mesh in enumerate(MESHES) if mesh != reading}
    (tmp_path / "stores.json").write_text(json.dumps([[str(place) for place in way] for way in ways.values()]))
    finished = train(tmp_path, reading, "reading", script=TAKING_UP)
    for writing, way in ways.items():
        before, after = (saved(place) for place in way)
        assert sorted(before) == sorted(after), (writing, reading)
        assert {"exp_avg", "exp_avg_sq", "step"} <= {name.rpartition(".")[2] for name in before}
        changed = [name for name, value in before.items() if exactly(value) != exactly(after[name])]
        assert not changed, (writing, reading)
    assert finished.result is not None
    assert finished.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)


def test_the_moments_are_equal_whoever_has_saved_them(stores: dict[str, Path]) -> None:
    """All trained the same steps: to rounding, all saved the same numbers under the same names."""
    states = {mesh: saved(place) for mesh, place in stores.items()}
    first = states["dp=1"]
    for mesh, state in states.items():
        assert sorted(state) == sorted(first), mesh
        for name, value in state.items():
            assert value == pytest.approx(first[name], rel=1e-6, abs=1e-9), (mesh, name)


def test_a_training_goes_on_under_another_mesh(whole: Finished, tmp_path: Path) -> None:
    train(tmp_path, "pp=2", "moved", "--stop-after", str(AT))
    moved = train(tmp_path, "dp=2,fsdp=2", "moved")
    assert "mesh" in moved.output, "it is said that the mesh is another"
    assert moved.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-9)
    exported = run_command(tmp_path, "checkpoint", "export", "runs/moved", "plain.safetensors")
    assert exported.exit_code == 0
    assert run_command(tmp_path, "hash", "plain.safetensors").output.split()[0] == moved.weights_sha256
