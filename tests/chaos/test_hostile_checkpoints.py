# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, weights and run directories made by somebody who means harm: nothing in them runs, and all is explained.

A pickle bomb lies in every place where a file is read; it would leave a file called "canary". The author of a hostile
checkpoint also knows how to compute hashes, so manifests that are right in themselves lie too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multiproc.running import Finished, run_command, run_python, run_unisono
from multiproc.scripts import SMALL
from unisono.checkpoint.stamp import stamp, unstamp

SCRIPT = SMALL + "fit(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.optim.Adam, max_steps=6)\n"
OPTIONS = ("--name", "r", "--checkpoint-every", "2")
STORE = Path("runs/r/checkpoints")


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (exec, (f"open({str(self.canary)!r}, 'w').close()",))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_unisono(SCRIPT, folder, *OPTIONS, workers=1)
    return folder


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_run, tmp_path / "copy")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def bomb(canary: Path) -> bytes:
    """Armed: whoever unpickles it leaves the canary."""
    data = pickle.dumps(Bomb(canary))
    subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"], input=data, check=True)
    assert canary.exists()
    canary.unlink()
    return data


def assert_refused(finished: Finished, *codes: int) -> None:
    assert finished.exit_code in codes, finished.output
    assert "UNI-" in finished.output
    assert "UNI-9001" not in finished.output
    assert "Traceback" not in finished.output


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """And stamp it again, so that its hash is right."""
    document = unstamp(path.read_bytes(), str(path))[0]
    change(document)
    path.write_bytes(stamp(document))


def test_a_pickle_bomb_in_every_file_of_a_run_runs_nowhere(folder: Path, bomb: bytes, canary: Path) -> None:
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    kinds = {".json", ".jsonl", ".safetensors"}
    assert kinds <= {path.suffix for path in files}
    for path in files:
        path.write_bytes(bomb)
    (folder / STORE / "parts/000000000004-1").mkdir(parents=True)
    (folder / STORE / "parts/000000000004-1/0.json").write_bytes(bomb)
    assert_refused(run_unisono(SCRIPT, folder, *OPTIONS, expect=None), 2, 30, 32)
    assert_refused(run_unisono(SCRIPT, folder, "--checkpoint-to", str(STORE), expect=None), 32)
    for command in (
        ("checkpoint", "verify", "r", "--all"),
        ("checkpoint", "export", "r", "out.pt"),
        ("checkpoint", "diff", "r@4", "r@6"),
        ("hash", "runs/r/final.safetensors"),
    ):
        refused = run_command(folder, *command, expect=None)
        assert refused.exit_code in (1, 2, 32), refused.output
        assert "Traceback" not in refused.output
    assert not canary.exists()


def test_a_pickle_bomb_as_a_chunk_with_the_right_hash_runs_nowhere(folder: Path, bomb: bytes, canary: Path) -> None:
    """Small ones, padded ones, and ones that torch.load would take."""
    torch_file = folder / "bomb.pt"
    torch.save({"weight": Bomb(canary)}, torch_file)
    for raw in (bomb, torch_file.read_bytes()):
        for path in (folder / STORE / "steps").iterdir():
            edit_manifest(path, lambda document, raw=raw: _put_into_every_chunk(document, raw, folder / STORE))
        refused = run_unisono(SCRIPT, folder, "--checkpoint-to", str(STORE), workers=1, expect=32)
        assert_refused(refused, 32)
        assert "none of the checkpoints in" in refused.output
    refused = run_command(folder, "checkpoint", "verify", "r", expect=1)
    assert "is no safetensors file" in refused.output
    assert not canary.exists()


def _put_into_every_chunk(document: dict[str, Any], raw: bytes, store: Path) -> None:
    renamed = {}
    for number, (digest, entry) in enumerate(list(document["chunks"].items())):
        data = raw.ljust(entry["bytes"], b"\0") + bytes([number])
        renamed[digest] = hashlib.sha256(data).hexdigest()
        path = store / "chunks" / renamed[digest][:2] / f"{renamed[digest]}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        document["chunks"][renamed[digest]] = {"bytes": len(data), "stored": len(data), "sealed": False}
        del document["chunks"][digest]
    for tensor in document["tensors"].values():
        tensor["pieces"] = [[renamed[digest], *rest] for digest, *rest in tensor["pieces"]]


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_weights_that_are_a_bomb_are_not_loaded(form: str, tmp_path: Path, bomb: bytes, canary: Path) -> None:
    path = tmp_path / "weights.pt"
    if form == "pickle":
        path.write_bytes(bomb)
    else:
        torch.save({"model": {"weight": torch.zeros(3), "bias": Bomb(canary)}}, path)
    refused = run_command(tmp_path, "hash", "weights.pt", expect=2)
    assert_refused(refused, 2)
    assert "weights.pt" in refused.output
    assert not canary.exists()


# Facts that say something else than the training knows, each in a manifest whose hash is right. All are tried in one
# process: a training that runs by itself reads its settings anew each time.
HOSTILE_FACTS = {
    "no facts": "facts.clear()",
    "no tree": "del facts['tree']",
    "a tree that is a text": "facts['tree'] = 'model'",
    "a tree of nothing": "facts['tree'] = {}",
    "a tree with a tensor that is not there": "facts['tree'] = {'t': 'model.none'}",
    "a tree without end": "facts['tree'] = nested(900)",
    "keys that cannot be keys": "facts['tree'] = {'d': [[[1], 2]]}",
    "no number of microbatches": "facts['job'].pop('microbatches')",
    "a number of microbatches that is none": "facts['job']['microbatches'] = 'many'",
    "a job that is a list": "facts['job'] = []",
    "a fingerprint that is a number": "facts['fingerprint'] = 7",
    "a step that is a text": "change('train', 'step', 'six')",
    "attributes that are methods": "change('train', 'advance', 5)",
    "modes of too few modules": "change(None, 'modes', [])",
    "an optimizer without groups": "change('optimizer', 'groups', 3)",
}
TRY_THEM = (
    SMALL
    + f"""
import shutil
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.core.errors import UnisonoError
from unisono.train import context


def nested(depth):
    return [] if depth == 0 else [nested(depth - 1)]


def change(branch, key, value):
    rows = facts["tree"]["d"]
    if branch is not None:
        rows = next(item for name, item in rows if name == branch)["d"]
    rows[:] = [row for row in rows if row[0] != key] + [[key, value]]


for name, edit in {HOSTILE_FACTS!r}.items():
    shutil.copytree("runs/r/checkpoints", name)
    for path in Path(name, "steps").iterdir():
        document = unstamp(path.read_bytes(), name)[0]
        facts = document["facts"]
        exec(edit)
        path.write_bytes(stamp(document))
    os.environ["UNISONO_CHECKPOINT_TO"], os.environ["UNISONO_RUN_DIR"] = name, "run of " + name
    try:
        fit(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.optim.Adam, max_steps=8)
        said = "went on"
    except UnisonoError as error:
        said = str(error)
    except BaseException as error:
        said = "crashed: " + repr(error)
    print("TRIED", repr((name, said)), flush=True)
"""
)


def test_facts_that_lie_are_refused_with_a_word_and_never_crash(folder: Path) -> None:
    done = run_python(TRY_THEM, folder, expect=None)
    tried = dict(
        ast.literal_eval(line.removeprefix("TRIED ")) for line in done.output.splitlines() if line.startswith("TRIED ")
    )
    assert tried.keys() == HOSTILE_FACTS.keys(), done.output
    wrong = {name: said for name, said in tried.items() if not said.startswith("UNI-302")}
    assert wrong == {}, json.dumps(wrong, indent=1)
