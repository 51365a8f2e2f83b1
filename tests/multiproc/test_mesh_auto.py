# SPDX-License-Identifier: Apache-2.0
"""``--mesh auto``: a probe runs the script up to its training, and what was chosen is what is run and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multiproc.running import run_python, run_unisono
from multiproc.scripts import SMALL
from unisono.control import mesh_auto
from unisono.core import events
from unisono.core.errors import ScriptFailed, SetupError, UsageError
from unisono.core.spec import build_run_spec

# Says when it runs, and when it gets behind its training.
TRAINS = (
    SMALL
    + """
Path("runs-of-the-script").open("a").write("x")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 2))
try:
    fit(model, torch.optim.AdamW)
finally:
    Path("closed").open("a").write("x")
Path("behind-the-training").open("a").write("x")
"""
)


def choose(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = TRAINS, **values: Any) -> tuple[Any, list[str]]:
    """What auto makes of `values`, by a real probe, on a machine of 3,600 bytes."""
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(mesh_auto, "machine_bytes", lambda: 3600)
    said: list[str] = []
    values = {"script": "train.py", "mesh": "auto", **values}
    return mesh_auto.chosen(build_run_spec(values, "test"), values, said.append), said


def test_a_model_that_fits_gets_replicas_of_one_rank_and_the_spec_says_so(tmp_path: Path) -> None:
    finished = run_unisono(TRAINS, tmp_path, "--mesh", "auto", "--name", "one", workers=2)
    (said,) = [line for line in finished.output.splitlines() if line.startswith("mesh     dp")]
    assert said.startswith(
        "mesh     dp=2: 90 parameters need 1.4 kB with gradients and AdamW's state, each of 2 processes"
    )
    assert finished.run_dir is not None
    run = json.loads((finished.run_dir / "spec.json").read_text())["run"]
    assert (run["mesh"], run["workers"]) == ("", "2")
    assert (tmp_path / "runs-of-the-script").read_text() == "xxx", "a probe and two workers"
    assert (tmp_path / "behind-the-training").read_text() == "xx", "the probe never got there"
    assert (tmp_path / "closed").read_text() == "xxx", "but it closed what it had opened"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]


def test_a_model_that_does_not_fit_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, said = choose(tmp_path, monkeypatch, workers="2")
    assert values["mesh"] == "dp=1,fsdp=2"
    assert "workers" not in values
    assert "each of 2 processes has 1.8 kB" in said[-1]
    spec = build_run_spec(values, "test")
    assert (spec.mesh, spec.workers.max) == ("fsdp=2", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "runs-of-the-script", "train.py"]


def test_what_auto_has_shared_is_trained_like_on_one_process(tmp_path: Path) -> None:
    """On a machine of 3,600 bytes, as far as the choice is concerned."""
    alone = run_python(TRAINS, tmp_path)
    asked = ["unisono", "run", "train.py", "--mesh", "auto", "--workers", "2", "--name", "shared"]
    command = f"""
import sys
from unisono.cli import main
from unisono.control import mesh_auto

mesh_auto.machine_bytes = lambda: 3600
sys.argv = {asked}
sys.exit(main())
"""
    (tmp_path / "command.py").write_text(command)
    shared = run_python(tmp_path / "command.py", tmp_path)
    assert "mesh     dp=1,fsdp=2: 90 parameters need 1.4 kB" in shared.output
    assert "mesh     fsdp=2: parameters in 2 parts" in shared.output
    losses = [[event.loss for event in run.events_of(events.StepFinished)] for run in (shared, alone)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_nothing_fits_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="no mesh of 1 fits"):
        choose(tmp_path, monkeypatch, TRAINS.replace("range(4)", "range(40)"), workers="1")


def test_an_option_that_the_choice_leaves_without_effect_is_refused(tmp_path: Path) -> None:
    finished = run_unisono(TRAINS, tmp_path, "--mesh", "auto", "--zero", "2", workers=2, expect=2)
    assert "--mesh auto: zero belongs to fsdp" in finished.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (SMALL + "def broken():\n    raise KeyError('lost')\nbroken()\n", 10, ["KeyError: 'lost'", "in broken"]),
        (SMALL, 10, ["UNI-1103", "ended without training anything"]),
        (SMALL + "os._exit(7)\n", 10, ["left with 7 before it came to its training"]),
        (SMALL + "print('last words')\nos.kill(os.getpid(), 9)\n", 10, ["ended by SIGKILL", "last words"]),
        (SMALL + "raise SystemExit('no data')\n", 10, ["no data"]),
    ],
)
def test_a_script_that_never_trains_ends_as_always(script: str, code: int, words: list[str], tmp_path: Path) -> None:
    finished = run_unisono(script, tmp_path, "--mesh", "auto", workers=2, expect=code)
    for word in words:
        assert word in finished.output
    assert not (tmp_path / "runs").exists()


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    with pytest.raises(SetupError, match=r"did not come to its training within 0\.2 s"):
        mesh_auto.ask_probe(build_run_spec({"script": "train.py", "mesh": "auto"}, "test"), said.append, 0.2)


def test_words_come_while_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_auto, "_SAY_EVERY_S", 0.05)
    _, said = choose(tmp_path, monkeypatch, workers="2")
    assert any("has not come to its training yet" in line for line in said)


def test_a_run_that_goes_on_keeps_its_shape_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_auto, "ask_probe", lambda *_: pytest.fail("nobody should be asked"))
    (tmp_path / "runs" / "old").mkdir(parents=True)
    record = {"run": {"mesh": "fsdp=2", "workers": "1:3"}, "job": None}
    (tmp_path / "runs" / "old" / "spec.json").write_text(json.dumps(record))
    assert choose(tmp_path, monkeypatch, name="old")[0]["mesh"] == "dp=1:3,fsdp=2"
    values, said = choose(tmp_path, monkeypatch, name="old", workers="4")
    assert values["mesh"] == "dp=2,fsdp=2"
    assert "began" in said[-1]
    with pytest.raises(UsageError, match="replicas of 2 processes"):
        choose(tmp_path, monkeypatch, name="old", workers="3")


def test_the_mesh_that_a_script_asks_for_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = TRAINS.replace("AdamW)", "AdamW, parallel=unisono.Parallel(mesh='dp=3,fsdp=2'))")
    values, said = choose(tmp_path, monkeypatch, script)
    assert values["mesh"] == "dp=3,fsdp=2"
    assert said[-1] == "mesh     dp=3,fsdp=2: as train.py asks for it"
    assert choose(tmp_path, monkeypatch, script, workers="4")[0]["mesh"] == "dp=2,fsdp=2"
    with pytest.raises(UsageError, match="replicas of 2 processes"):
        choose(tmp_path, monkeypatch, script, workers="3")
    finished = run_unisono("train.py", tmp_path, workers=2, expect=11)
    assert "Parallel(mesh='dp=3,fsdp=2') asks for replicas of 2 (fsdp) ranks" in finished.output
    assert "unisono run train.py --mesh auto" in finished.output


def test_python_alone_cannot_choose(tmp_path: Path) -> None:
    finished = run_python(TRAINS, tmp_path, env={"UNISONO_MESH": "auto"}, expect=1)
    assert "--mesh auto needs unisono run" in finished.output


def test_a_store_is_no_training_to_choose_a_mesh_for(tmp_path: Path) -> None:
    script = "import unisono\nstore = unisono.kvstore('local')\nopen('went-on', 'w')\n"
    finished = run_unisono(script, tmp_path, "--mesh", "auto", workers=1, expect=11)
    assert "--mesh cannot take effect with unisono.kvstore" in finished.output
    assert not (tmp_path / "went-on").exists()


def test_the_error_of_a_probe_is_the_scripts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScriptFailed) as caught:
        choose(tmp_path, monkeypatch, SMALL + "fit(batch_size='many')\n")
    assert "'many'" in caught.value.what
    assert "train.py" in caught.value.where
