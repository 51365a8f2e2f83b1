# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: two runs never share one, and a disk that fails is counted, told, and never raises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from unisono.core import events
from unisono.core.errors import DiskFull, RunDirectoryError, UsageError
from unisono.core.events import Configured, Evaluated, Notice, RunFinished, StepFinished, StepSkipped
from unisono.core.run_dir import Recorder, RunDir, create, find, write_atomically
from unisono.core.spec import RunSpec

NOON = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recorder(path: Path) -> Recorder:
    spec, run_dir = create(RunSpec(script="train.py", run_dir=str(path)), NOON)
    return Recorder(run_dir, spec)


def notice(text: str) -> Notice:
    return Notice(code="test", text=text)


def test_a_run_is_named_after_its_script_and_the_time() -> None:
    spec, run_dir = create(RunSpec(script="some/train.py"), NOON)
    assert spec.name.startswith("train-2023111")
    assert run_dir.path == Path("runs") / spec.name == Path(spec.run_dir)
    assert run_dir.logs.is_dir()
    assert run_dir.worker_log(3) == run_dir.logs / "worker-3.log"


def test_runs_that_start_within_one_second_get_directories_of_their_own() -> None:
    names = [create(RunSpec(script="train.py"), NOON)[0].name for _ in range(3)]
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    assert sorted(path.name for path in Path("runs").iterdir()) == names


def test_a_name_that_is_taken_is_refused() -> None:
    create(RunSpec(name="mine"), NOON)
    with pytest.raises(UsageError, match="already holds a run") as caught:
        create(RunSpec(name="mine"), NOON)
    assert caught.value.exit_code == 2


def test_a_directory_that_exists_may_be_used_until_a_run_is_in_it(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("kept")
    spec, run_dir = create(RunSpec(run_dir=str(target)), NOON)
    assert (spec.name, run_dir.path) == ("mine", target)
    run_dir.events.write_text("")
    with pytest.raises(UsageError, match="already holds a run"):
        create(RunSpec(run_dir=str(target)), NOON)
    assert (target / "notes.txt").read_text() == "kept"


def test_parents_of_a_run_directory_are_made(tmp_path: Path) -> None:
    _, run_dir = create(RunSpec(run_dir=str(tmp_path / "a" / "b" / "c")), NOON)
    assert run_dir.logs.is_dir()


@pytest.mark.parametrize("below", ["run", "deep/run"])
def test_a_directory_below_a_file_cannot_be_made(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError) as caught:
        create(RunSpec(run_dir=str(tmp_path / "file" / below)), NOON)
    assert (caught.value.code, caught.value.exit_code) == ("UNI-3001", 30)
    assert str(tmp_path / "file" / below) in caught.value.what


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a directory"):
        create(RunSpec(run_dir=str(tmp_path / "file")), NOON)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("way", ["file", "dangling link"])
def test_something_else_called_runs_is_an_error_and_not_an_endless_search(tmp_path: Path, way: str) -> None:
    if way == "file":
        (tmp_path / "runs").write_text("")
    else:
        (tmp_path / "runs").symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(RunDirectoryError):
        create(RunSpec(script="train.py"), NOON)


def test_a_run_is_found_by_its_directory_or_its_name(tmp_path: Path) -> None:
    spec, run_dir = create(RunSpec(name="mine"), NOON)
    with pytest.raises(UsageError, match="there is no run at mine"):
        find("mine")  # an empty directory is no run yet
    Recorder(run_dir, spec).start()
    assert find("mine") == run_dir
    assert find(str(tmp_path / "runs" / "mine")).path == tmp_path / "runs" / "mine"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, "one")
    write_atomically(target, "two")
    assert target.read_text() == "two"
    (tmp_path / "a.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "three")
    assert target.read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_recorder_keeps_spec_events_result_and_logs(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    keeper.start()
    run_dir = keeper.run_dir
    assert json.loads(run_dir.spec.read_text()) == {"run": keeper.spec.model_dump(mode="json"), "job": None}
    told = [
        notice("hello"),
        Configured(job={"microbatches": 4}, fingerprint={}, steps_total=1, samples_per_epoch=None),
        RunFinished(result={"steps": 1, "weights_sha256": "ab"}),
    ]
    for event in told:
        keeper.handle(event)
    keeper.append(run_dir.worker_log(0), b"one\n")
    keeper.append(run_dir.worker_log(0), b"two\n")
    keeper.close()
    assert list(events.read(run_dir.events)) == told
    assert json.loads(run_dir.spec.read_text())["job"] == {"microbatches": 4}
    assert json.loads(run_dir.result.read_text()) == {"steps": 1, "weights_sha256": "ab"}
    assert run_dir.worker_log(0).read_bytes() == b"one\ntwo\n"
    assert keeper.lost == {}
    assert keeper.failure() is None


def step(number: int) -> StepFinished:
    return StepFinished(step=number, epoch=1, loss=0.5, samples=8 * number, lr=0.1, seconds=0.1, timings={})


def test_what_is_told_again_after_a_change_of_membership_is_written_once(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    keeper.start()
    evaluated = Evaluated(step=3, epoch=1, metrics={"loss": 0.5}, seconds=0.1)
    skipped = StepSkipped(step=2, because="the loss is nan")
    new = [step(1), skipped, step(3), evaluated, step(4), RunFinished(result={"steps": 4})]
    told = [step(1), step(1), skipped, skipped, step(1), step(3), skipped, evaluated, evaluated, step(4), step(3),
            RunFinished(result={"steps": 4}), RunFinished(result={"steps": 4, "workers": 1})]  # fmt: skip
    written = [event for event in told if keeper.handle(event)]
    keeper.close()
    assert [dataclasses.replace(event, time_s=0.0) for event in written] == [
        dataclasses.replace(event, time_s=0.0) for event in new
    ]
    assert list(events.read(keeper.run_dir.events)) == written
    assert json.loads(keeper.run_dir.result.read_text()) == {"steps": 4}


def test_notices_and_changes_of_membership_may_repeat_themselves(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    keeper.start()
    assert all(keeper.handle(notice("hello")) for _ in range(3))
    keeper.close()
    assert len(list(events.read(keeper.run_dir.events))) == 3


def test_a_full_disk_is_counted_and_told_and_stops_nothing(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    keeper.run_dir.events.symlink_to("/dev/full")
    keeper.start()
    for text in ("one", "two", "three"):
        keeper.handle(notice(text))
    (tmp_path / "run" / "result.json.tmp").symlink_to("/dev/full")
    keeper.handle(RunFinished(result={}))
    keeper.append(keeper.run_dir.worker_log(0), b"still written\n")
    keeper.close()

    assert keeper.lost == {"events.jsonl": 4, "result.json": 1}
    assert keeper.run_dir.worker_log(0).read_bytes() == b"still written\n"
    failure = keeper.failure()
    assert isinstance(failure, DiskFull)
    assert (failure.code, failure.exit_code) == ("UNI-3002", 30)
    assert (
        failure.what
        == f"the run directory {tmp_path / 'run'} is full: lost events.jsonl (4 writes), result.json (1 write)"
    )
    assert "No space left on device" in failure.cause
    assert "MB free" in failure.cause


def test_a_spec_that_could_not_be_updated_is_counted(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    keeper.start()
    before = keeper.run_dir.spec.read_text()
    (tmp_path / "run" / "spec.json.tmp").symlink_to("/dev/full")
    keeper.handle(Configured(job={}, fingerprint={}, steps_total=None, samples_per_epoch=None))
    keeper.close()
    assert keeper.lost == {"spec.json": 1}
    assert keeper.run_dir.spec.read_text() == before


def test_a_directory_that_vanishes_is_not_called_full(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    keeper.start()
    keeper.run_dir.logs.rmdir()
    keeper.append(keeper.run_dir.worker_log(0), b"lost\n")
    keeper.close()
    failure = keeper.failure()
    assert type(failure) is RunDirectoryError
    assert failure.what == f"the run directory {tmp_path / 'run'} could not be written: lost worker-0.log (1 write)"


@pytest.mark.parametrize("name", ["spec.json.tmp", "events.jsonl"])
def test_a_run_that_cannot_be_recorded_does_not_start(tmp_path: Path, name: str) -> None:
    keeper = recorder(tmp_path / "run")
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(RunDirectoryError) as caught:
        keeper.start()
    assert caught.value.exit_code == 30


def test_a_full_disk_is_noticed_before_anything_is_started(tmp_path: Path) -> None:
    keeper = recorder(tmp_path / "run")
    (tmp_path / "run" / "spec.json.tmp").symlink_to("/dev/full")
    with pytest.raises(DiskFull) as caught:
        keeper.start()
    assert caught.value.code == "UNI-3002"


def test_paths_of_a_run_are_where_the_documentation_says() -> None:
    run_dir = RunDir(Path("runs/x"))
    paths = [run_dir.spec, run_dir.events, run_dir.result, run_dir.weights, run_dir.control, run_dir.logs]
    names = ["spec.json", "events.jsonl", "result.json", "final.safetensors", "control.json", "logs"]
    assert [path.name for path in paths] == names
