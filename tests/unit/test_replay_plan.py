# SPDX-License-Identifier: Apache-2.0
"""What a replay will run, what it says is not as it was, and what it makes of what comes out. Nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from receipted_runs import SPEC, a_run, configured, receipt_of, written

from unisono.control.replay import DIFFERENT, SAME, Comparison, prepare
from unisono.core import events, signing
from unisono.core.errors import ScriptMissing, UsageError
from unisono.core.receipt import Losses, Receipt, seal
from unisono.core.receipt_gathering import code_read, write_receipt
from unisono.core.spec import RunSpec


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(signing.VARIABLE, raising=False)
    Path("train.py").write_text("import model\n")
    Path("model.py").write_text("x = 1\n")


def receipt(spec: RunSpec = SPEC, stopped_early: str = "") -> str:
    """The path of one that this user has signed."""
    run = a_run(files=code_read("train.py").files)
    result = {"steps": 40, "weights_sha256": "ab" * 32, "stopped_early": stopped_early}
    run.say(events.RunFinished, result=result)
    run_dir = written(run)
    write_receipt(run_dir, spec)
    return str(run_dir.receipt)


# --- what will run


def test_a_replay_asks_for_the_same_training_in_a_new_directory() -> None:
    spec = SPEC.model_copy(update={"threads": 2, "seed": 7, "faults": "f.toml", "listen": "auto", "checkpoint_to": "x"})
    values = prepare(receipt(spec), workers="3").values
    assert {key: values[key] for key in ("script", "args", "threads", "seed", "microbatches", "workers", "device")} == {
        "script": "train.py", "args": ["--lr", "0.1"], "threads": 2, "seed": 7, "microbatches": 4, "workers": "3",
        "device": "cpu",
    }  # fmt: skip
    assert (values["name"], values["run_dir"], values["resume"]) == ("digits-replay", "", "never")
    assert not {"faults", "listen", "checkpoint_to", "checkpoint_key", "local"} & set(values)
    Path("runs/digits-replay").mkdir()
    assert prepare("digits").values["name"] == "digits-replay-2"
    assert prepare("digits", run_dir="here").values["run_dir"] == "here"


def test_a_seed_that_only_the_script_knew_is_left_to_the_script() -> None:
    assert prepare(receipt()).values["seed"] is None


def test_a_run_that_was_stopped_from_outside_is_stopped_at_the_same_step() -> None:
    assert prepare(receipt(stopped_early="stopped by unisono stop")).values["stop_after"] == 40
    assert prepare(receipt()).values["stop_after"] is None


def test_more_workers_than_microbatches_are_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="4 microbatches"):
        prepare(receipt(), workers="5")


def test_a_script_that_is_not_here_is_asked_for() -> None:
    path = receipt()
    Path("train.py").rename("moved.py")
    with pytest.raises(ScriptMissing, match="not here"):
        prepare(path)
    plan = prepare(path, script="moved.py")
    assert (plan.values["script"], plan.lines) == ("moved.py", [])
    with pytest.raises(UsageError, match="no script"):
        prepare(receipt(SPEC.model_copy(update={"script": ""})))


def test_what_a_stranger_asks_for_is_not_run_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    path = receipt()
    signer = signing.own_key()
    assert signer is not None
    monkeypatch.setenv(signing.VARIABLE, "mine.key")
    with pytest.raises(UsageError, match="not by you") as refused:
        prepare(path)
    assert "train.py --lr 0.1" in refused.value.where
    with pytest.raises(UsageError, match="not by the key you named"):
        prepare(path, signer=signing.make_key().public)
    prepare(path, signer=signer.public)
    prepare(path, trusted=True)
    Path("unsigned.json").write_bytes(seal(receipt_of(a_run()), None))
    with pytest.raises(UsageError, match="is not signed"):
        prepare("unsigned.json", signer=signer.public)
    prepare("unsigned.json", trusted=True)


# --- what is not as it was


def test_nothing_is_said_of_what_is_as_it_was() -> None:
    assert prepare(receipt()).lines == []


def test_each_file_that_differs_gets_a_line_the_script_first() -> None:
    path = receipt()
    Path("train.py").write_text("import other\n")
    Path("other.py").write_text("")
    lines = prepare(path).lines
    assert [line.split()[0] for line in lines] == ["train.py", "model.py", "other.py"]
    assert "is not that of the receipt: sha256 " in lines[0]
    assert "not here" in lines[1]
    assert "was not then" in lines[2]


def test_another_version_gets_a_line() -> None:
    found = receipt_of(a_run(files=code_read("train.py").files))
    found = found.model_copy(update={"versions": found.versions | {"torch": "1.0"}})
    Path("old.json").write_bytes(seal(found, signing.make_key()))
    (line,) = prepare("old.json").lines
    assert line.startswith("torch is ")
    assert line.endswith(" here, 1.0 in the receipt")


@pytest.mark.parametrize(
    ("told", "threads", "words"),
    [
        ({}, 1, []),
        ({"data": "1499/abcdefabcdef"}, 1, ["the data is not that of the receipt", "1,499", "1,500"]),
        ({"hash_": "99" * 32}, 1, ["the data is not that of the receipt", "hash 9999"]),
        ({"data": "-1/000000000000"}, 1, ["is a stream"]),
        ({}, 2, ["another numerics fingerprint, so the bits may differ: threads 1 -> 2"]),
        ({"seed": 4}, 1, ["set up differently: seed 3 -> 4"]),
    ],
)
def test_data_and_fingerprint_are_compared_as_soon_as_they_are_known(told: Any, threads: int, words: list[str]) -> None:
    values = configured(**told)
    values["fingerprint"] |= {"threads": threads}
    lines = Comparison(receipt_of(a_run())).take(events.Configured(**values))
    assert len(lines) == (1 if words else 0)
    assert all(word in lines[0] for word in words)


# --- what came out


def compared(found: Receipt, losses: dict[int, float], weights: str = "ab" * 32) -> tuple[int, str]:
    comparison = Comparison(found)
    for step, loss in losses.items():
        comparison.take(events.StepFinished(step=step, epoch=1, loss=loss, samples=1, lr=0.1, seconds=0.1, timings={}))
    result = {"weights_sha256": weights, "steps": len(losses), "workers": 3}
    comparison.take(events.RunFinished(result=result))
    verdict = comparison.verdict(0)
    return verdict.exit_code, "\n".join(verdict.lines)


AS_IT_WAS = {step: 1.0 / step for step in range(1, 41)}


def test_the_same_weights_are_the_same_run() -> None:
    code, text = compared(receipt_of(a_run()), AS_IT_WAS)
    assert code == SAME
    assert "the same weights, bit for bit" in text
    assert "3 here" in text


def test_the_first_step_whose_loss_differs_by_a_bit_is_named() -> None:
    other = AS_IT_WAS | {step: 1.0 / step * (1 + 2**-52) for step in range(13, 41)}
    code, text = compared(receipt_of(a_run()), other, "cd" * 32)
    assert code == DIFFERENT
    assert "the first loss that differs is that of step 13" in text


def test_where_only_some_losses_were_kept_the_step_is_named_as_closely_as_can_be() -> None:
    found = receipt_of(a_run())
    rows = [row for row in found.losses.rows if row[0] % 8 == 1 or row[0] == 40]
    found = found.model_copy(update={"losses": Losses(every=8, rows=rows)})
    _, text = compared(found, AS_IT_WAS | dict.fromkeys(range(13, 41), 0.5), "cd" * 32)
    assert "the same up to step 9 and differ at step 17" in text
    assert "every 8th" in text


def test_a_difference_that_no_loss_shows_is_still_one() -> None:
    code, text = compared(receipt_of(a_run()), AS_IT_WAS, "cd" * 32)
    assert code == DIFFERENT
    assert "all 40 losses that were compared are the same" in text


def test_a_run_that_promised_no_bits_is_reminded_of_it() -> None:
    code, text = compared(receipt_of(a_run(exact=False)), {1: 0.5}, "cd" * 32)
    assert code == DIFFERENT
    assert "not exact" in text
    assert "1 steps here, 40 in the receipt" in text


def test_a_run_that_was_changed_on_the_way_is_reminded_of_it() -> None:
    run, says = a_run(), "staleness inf -> 0; bits depend on who was faster until here"
    run.say(events.Resumed, step=20, digest="ab" * 32, differs=[says])
    run.say(events.Resumed, step=30, digest="ab" * 32)
    found = receipt_of(run)
    assert compared(found, AS_IT_WAS)[1].count("bit for bit") == 1
    code, text = compared(found, AS_IT_WAS, "cd" * 32)
    assert code == DIFFERENT
    assert f"went on from step 20 not as before: {says}" in text
    assert "step 30" not in text


def test_a_replay_that_fails_or_is_preempted_ends_as_that() -> None:
    comparison = Comparison(receipt_of(a_run()))
    assert comparison.verdict(20).exit_code == 20
    left = {"weights_sha256": "cd" * 32, "steps": 7, "stopped_early": "asked to leave by SIGTERM"}
    comparison.take(events.RunFinished(result=left))
    verdict = comparison.verdict(75)
    assert verdict.exit_code == 75
    assert "  7 steps here (stopped early: asked to leave by SIGTERM), 40 in the receipt" in verdict.lines
