# SPDX-License-Identifier: Apache-2.0
"""``unisono checkpoint ...``: what a user types and reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from memory_store import save
from torch import Tensor
from typer.testing import CliRunner

from unisono.checkpoint.listing import list_steps
from unisono.checkpoint.store import Store, open_store
from unisono.checkpoint.weights import hash_file, hash_state
from unisono.cli.checkpoint import app
from unisono.core.errors import UnisonoError, UsageError, WrongKey

KEY, OLD_KEY = "11" * 32, "22" * 32


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNISONO_CHECKPOINT_KEY", raising=False)


def state(number: float = 0.0) -> dict[str, Tensor]:
    return {"model.w": torch.arange(4.0) + number, "optimizer.w.exp_avg": torch.zeros(4)}


def a_run(name: str = "mine", steps: tuple[int, ...] = (10, 20, 30), shift: float = 0.0) -> Store:
    store = open_store(f"runs/{name}/checkpoints")
    for step in steps:
        save(store, step, state(step + shift), {"metrics": {"loss": 1 / step}})
    return store


def unisono(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, UnisonoError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("place", ["mine", "runs/mine", "runs/mine/checkpoints", "file://{}/runs/mine/checkpoints"])
def test_a_run_is_found_by_name_folder_or_url(tmp_path: Path, place: str) -> None:
    a_run()
    lines = unisono("list", place.format(tmp_path)).splitlines()
    assert [line.split()[1] for line in lines] == ["10", "20", "30"]
    assert "loss 0.1000" in lines[0]


def test_a_run_that_keeps_its_checkpoints_elsewhere_is_followed_there(tmp_path: Path) -> None:
    save(open_store("elsewhere"), 7, state())
    (tmp_path / "runs" / "far").mkdir(parents=True)
    (tmp_path / "runs" / "far" / "spec.json").write_text(json.dumps({"run": {"checkpoint_to": "elsewhere"}}))
    assert unisono("list", "far").split()[1] == "7"


def test_a_place_without_checkpoints_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run and no directory"):
        unisono("list", "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no checkpoints"):
        unisono("verify", "empty")


def damage(step: int) -> None:
    path = Path(f"runs/mine/checkpoints/steps/{step:012d}.json")
    path.write_bytes(path.read_bytes()[:-1] + b" ")


def test_verify_says_good_or_damaged() -> None:
    a_run()
    assert unisono("verify", "mine").startswith("step 30: good")
    assert unisono("verify", "mine@10").startswith("step 10: good")
    damage(20)
    lines = unisono("verify", "mine", "--all", code=1).splitlines()
    assert [line for line in lines if line.startswith("step")][1] == "step 20: damaged"
    assert "hash" in lines[2]
    assert "damaged" in unisono("list", "mine", code=1)


def test_export_writes_the_weights_or_everything() -> None:
    a_run()
    assert "1 tensors of step 30" in unisono("export", "mine", "w.pt")
    assert torch.load("w.pt", weights_only=True)["w"].equal(torch.arange(4.0) + 30)
    unisono("export", "mine@10", "all.safetensors", "--all")
    assert hash_file(Path("all.safetensors")) == hash_state(state(10))


def test_export_passes_over_what_is_damaged_and_says_so() -> None:
    a_run()
    damage(30)
    output = unisono("export", "mine", "w.pt")
    assert "passed over step 30" in output
    assert "of step 20" in output


def test_diff_says_where_the_first_difference_is() -> None:
    a_run()
    a_run("other")
    assert "the same, bit for bit: 2 tensors" in unisono("diff", "mine", "other")
    a_run("third", steps=(10,))
    save(open_store("runs/third/checkpoints"), 20, state(21), {"metrics": {"loss": 1 / 20}, "lr": 2})
    output = unisono("diff", "mine", "third", code=1)
    assert "of 2 steps that both have a checkpoint of, step 20 is the first that differs" in output
    assert "model.w[0]: 20.0 and 21.0 (4 of 4 elements differ, by at most 1)" in output
    assert "lr: nothing and 2" in output
    assert "model.w[0]: 10.0 and 30.0" in unisono("diff", "mine@10", "mine", code=1)


def test_prune_keeps_what_the_rules_say() -> None:
    store = a_run(steps=(10, 20, 30, 40, 50))
    rules = ("prune", "mine", "--keep-last", "2", "--keep-every", "20", "--best", "loss:max")
    assert "would remove 1 of 5 checkpoints: 30" in unisono(*rules, "--dry-run")
    assert list_steps(store) == [10, 20, 30, 40, 50]
    assert "removed 1 of 5 checkpoints: 30; 1 chunks" in unisono(*rules)
    assert list_steps(store) == [10, 20, 40, 50]
    with pytest.raises(UsageError, match="which checkpoints to keep"):
        unisono("prune", "mine")
    assert list_steps(store) == [10, 20, 40, 50]
    unisono("verify", "mine", "--all")


def test_prune_removes_damaged_ones_when_asked() -> None:
    store = a_run()
    damage(20)
    unisono("prune", "mine", "--keep-last", "5")
    assert list_steps(store) == [10, 20, 30]
    unisono("prune", "mine", "--damaged", "--orphans")
    assert list_steps(store) == [10, 30]
    unisono("verify", "mine", "--all")


def test_encrypted_checkpoints_need_their_key_and_can_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono.checkpoint.seal import Seal

    save(open_store("runs/mine/checkpoints"), 1, state(), seal=Seal([bytes.fromhex(OLD_KEY)]))
    assert "encrypted" in unisono("list", "mine")
    with pytest.raises(WrongKey, match="no key was given"):
        unisono("export", "mine", "w.pt")
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with pytest.raises(WrongKey, match="is sealed with key"):
        unisono("verify", "mine", "--key-file", str(keys))
    keys.write_text(f"{KEY}\n{OLD_KEY}")
    assert "2 chunks were written" in unisono("reseal", "mine", "--key-file", str(keys))
    monkeypatch.setenv("UNISONO_CHECKPOINT_KEY", KEY)
    assert unisono("verify", "mine").startswith("step 1: good")
    unisono("export", "mine", "w.pt")
    monkeypatch.delenv("UNISONO_CHECKPOINT_KEY")
    with pytest.raises(WrongKey, match="no key was given"):
        unisono("reseal", "mine")
