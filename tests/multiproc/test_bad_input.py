# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong, and what the last screen says then: a code, the cause, the cure, the exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from multiproc.running import Finished, run_command, run_unisono
from multiproc.scripts import SMALL
from unisono.core import events


def assert_says(finished: Finished, *texts: str) -> None:
    for text in texts:
        assert text in finished.output, f"{text!r} is not in:\n{finished.output}"


def assert_started_nothing(finished: Finished) -> None:
    assert finished.run_dir is None
    assert not finished.output.startswith("run ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, ["UNI-1001", "no script was given", "unisono run train.py"]),
        (["trian.py"], 2, ["UNI-1003", "trian.py does not exist", "did you mean 'train.py'?"]),
        (["/proc"], 2, ["UNI-1003", "/proc is not a file"]),
        (["train.py", "--workers", "0"], 2, ["UNI-1001", "at least one worker", "--workers 1"]),
        (["train.py", "--workers", "4:2"], 2, ["UNI-1001", "minimum is above the maximum", "--workers 2:4"]),
        (["train.py", "--workers", "x"], 2, ["UNI-1001", "--workers x", "--workers 2:8"]),
        (["train.py", "--wokers", "2"], 2, ["UNI-1001", "no option --wokers", "did you mean '--workers'?", "--help"]),
        (["train.py", "--lr", "0.1"], 2, ["UNI-1001", "no option --lr", "go behind --"]),
        (["train.py", "--seed", "x"], 2, ["UNI-1001", "--seed", "integer"]),
        (["train.py", "--device", "gpu"], 2, ["UNI-1001", "device", "'cpu'"]),
        (["train.py", "--name", "../x"], 2, ["UNI-1001", "name", "letters"]),
        (["train.py", "--spec", "no.toml"], 2, ["UNI-1001", "cannot read the spec file no.toml"]),
        (["train.py", "--workers", "2", "--local", "3"], 2, ["UNI-1001", "--local 3", "raise --workers"]),
        (["train.py", "--workers", "2", "--local", "1"], 2, ["UNI-1001", "--local 1", "nobody can join", "--listen"]),
        (["train.py", "--max-restarts", "-1"], 2, ["UNI-1001", "max_restarts = -1"]),
        (["train.py", "--hang-after", "0"], 2, ["UNI-1001", "hang_after = 0"]),
        (["train.py", "--listen", "nonsense"], 21, ["UNI-2102", "the name nonsense", "numeric address"]),
        (["train.py", "--faults", "no.toml"], 2, ["UNI-1004", "no.toml: No such file", "--faults"]),
        (["train.py", "--workers", "4", "--microbatches", "2"], 11,
         ["UNI-1202", "2 microbatches", "4 workers", "--workers 2"]),
        (["train.py", "--run-dir", "train.py/x"], 30, ["UNI-3001", "train.py is a file", "--run-dir"]),
        (["train.py", "--run-dir", "/proc/x"], 30, ["UNI-3001", "/proc/x", "--run-dir"]),
        (["train.py", "--run-dir", "taken"], 2, ["UNI-1001", "taken already holds a run", "--name or --run-dir"]),
        (["train.py", "--name", "taken"], 2, ["UNI-1001", "taken already holds a run", "--name or --run-dir"]),
    ],
    ids=lambda value: " ".join(value).replace("train.py ", "") if isinstance(value, list) else str(value),
)  # fmt: skip
def test_a_wrong_command_says_what_is_wrong_and_starts_nothing(
    arguments: list[str], code: int, says: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SMALL + "fit()\n")
    for taken in ("taken", "runs/taken"):
        (tmp_path / taken).mkdir(parents=True)
        (tmp_path / taken / "events.jsonl").write_text('{"kind":"notice","code":"x","text":"the run that was here"}\n')
    finished = run_command(tmp_path, "run", *arguments, expect=code)
    assert_says(finished, *says)
    assert "Traceback" not in finished.output
    assert_started_nothing(finished)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]


def test_a_command_that_does_not_exist_is_corrected(tmp_path: Path) -> None:
    assert_says(run_command(tmp_path, "runn", expect=2), "UNI-1001", "'runn'", "'run'")
    assert_says(run_command(tmp_path, expect=2), "Usage: unisono", "run")
    assert_says(run_command(tmp_path, "show", "nothing", expect=2), "UNI-1001", "no run at nothing")


@pytest.mark.parametrize(
    ("line", "message"), [("    if x = 3:", "invalid syntax"), ("return 3", "'return' outside function")]
)
def test_a_syntax_error_shows_its_line_before_any_worker_starts(line: str, message: str, tmp_path: Path) -> None:
    before = "def f(x):\n" if line.startswith(" ") else "\n"
    finished = run_unisono(before + line + "\n        pass\n" * line.endswith(":") + "\n", tmp_path, expect=10)
    assert_says(finished, "UNI-1102", message, f"train.py:2: {line.strip()}")
    assert_started_nothing(finished)


def test_a_misspelt_key_in_a_spec_file_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('script = "train.py"\nwrokers = 2\n')
    finished = run_command(tmp_path, "run", "--spec", "spec.toml", expect=2)
    assert_says(finished, "UNI-1002", "spec.toml: unknown key 'wrokers'", "did you mean 'workers'?", "known keys")
    assert_started_nothing(finished)
    (tmp_path / "spec.toml").write_text("workers = = 2\n")
    assert_says(run_command(tmp_path, "run", "--spec", "spec.toml", expect=2), "UNI-1001", "not valid TOML", "line 1")


IMPOSSIBLE = {
    "a microbatch for each worker": (
        "fit(microbatches=0)", "UNI-1202", ["cannot occupy 1 workers", "--microbatches 1"]),
    "a batch smaller than M": (
        "fit(batch_size=3, microbatches=4)", "UNI-1203", ["batch_size 3", "4 microbatches", "raise batch_size to 4"]),
    "no data": (
        "fit(data=[])", "UNI-1204", ["dataset is empty", "length is 0", "check the path"]),
    "drop_last of everything": (
        "fit(data=unisono.Data(DATA, drop_last=True), batch_size=64)", "UNI-1204", ["drop_last leaves nothing"]),
    "no end": (
        "fit(max_steps=None)", "UNI-1201", ["no end", "epochs, max_steps"]),
    "a sparse embedding with local steps": (
        "fit(nn.Embedding(5, 2, sparse=True), local=unisono.LocalSteps(h=2))", "UNI-1206", ["local", "sparse=False"]),
    "a sparse embedding with L1": (
        "fit(nn.Embedding(5, 2, sparse=True), l1=0.1)", "UNI-1201", ["only touched rows", "sparse=False"]),
    "synchronised batch norm without any": (
        "fit(batch_norm='synchronised')", "UNI-1201", ["synchronised", "batch norm"]),
    "a misspelt choice": (
        "fit(batch_norm='synchronized')", "UNI-1201", ["'synchronized'", "did you mean 'synchronised'?"]),
    "nothing to train": (
        "fit(nn.Linear(4, 2).requires_grad_(False))", "UNI-1201", ["no parameter", "requires_grad"]),
    "a split of a stream": (
        "fit(data=unisono.Data(iter([1]), split='blocks'))", "UNI-1201", ["split='blocks'", "iterable"]),
}  # fmt: skip


def test_every_training_that_cannot_work_is_refused_with_its_cause_and_cure(tmp_path: Path) -> None:
    """All in one run, for the sake of time: the script prints each refusal; the last call ends it."""
    attempts = "".join(
        f"""
current().trainings = 0
try:
    {call}
    print("RAN", {name!r})
except unisono.UnisonoError as error:
    print("REFUSED", json.dumps([{name!r}, error.code, error.exit_code, str(error)]))
"""
        for name, (call, _, _) in IMPOSSIBLE.items()
    )
    last = "current().trainings = 0\nfit(optimizer=torch.optim.SparseAdam)\n"
    finished = run_unisono(
        f"import json\n{SMALL}{attempts}{last}", tmp_path, "--checkpoint-every", "never", workers=1, expect=10
    )
    refused = {
        row[0]: row[1:]
        for row in (json.loads(line[8:]) for line in finished.log().splitlines() if line.startswith("REFUSED"))
    }
    assert "RAN" not in finished.log()
    for name, (_, code, texts) in IMPOSSIBLE.items():
        assert refused[name][:2] == [code, 11], f"{name}: {refused[name]}"
        for text in texts:
            assert text in refused[name][2], f"{name}: {text!r} is not in:\n{refused[name][2]}"
    assert_says(finished, "UNI-1101", "SparseAdam does not support dense gradients", "Adam instead", "worker 0 on")


def test_a_loss_that_is_not_a_number_names_step_microbatch_and_worker(tmp_path: Path) -> None:
    poison = """
def objective(model, batch):
    value = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return value * float("nan") if (batch[0] == 99.0).any() else value


DATA.tensors[0][21, 2] = 99.0  # without shuffling: step 3, microbatch 2 of 4, the first of worker 1
"""
    call = "unisono.Data(DATA, shuffle=False), loss=None, objective=objective"
    stopped = run_unisono(f"{SMALL}{poison}fit(data={call})\n", tmp_path, expect=12)
    assert_says(stopped, "UNI-1301", "loss is nan at step 3, microbatch 2, on worker 1", "learning rate", "skip")
    assert stopped.output.count("UNI-") == 1

    batch_norm = "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))"
    also = """
DATA.tensors[0][5] = float("inf")  # batch norm's statistics of that microbatch are lost; the weights must not be
result = fit(model := {model}, data={call}, on_nonfinite="skip", max_steps=8)
assert all(value.isfinite().all() for value in model.state_dict().values()), model.state_dict()
"""
    skipped = run_unisono(SMALL + poison + also.format(model=batch_norm, call=call), tmp_path)
    assert skipped.result is not None
    assert (skipped.result["steps"], skipped.result["skipped_steps"]) == (8, 4)
    assert [event.step for event in skipped.events_of(events.StepSkipped)] == [1, 3, 5, 7]
    assert_says(skipped, "skipped: the loss is nan at step 3, microbatch 2, on worker 1", "4 skipped")


def test_a_model_that_does_not_fit_the_data_shows_the_users_line_and_the_shapes(tmp_path: Path) -> None:
    network = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, inputs):
        return self.layer(inputs)  # here


fit(Net())
"""
    finished = run_unisono(SMALL + network, tmp_path, workers=1, expect=11)
    line = (SMALL + network).split("# here")[0].count("\n") + 1
    assert_says(
        finished, "UNI-1205", "RuntimeError: mat1 and mat2", f"train.py:{line}, in forward: return self.layer",
        "float32 (2, 4)", "int64 (2,)", "worker 0 on",
    )  # fmt: skip


def test_scripts_that_end_without_training_are_failures(tmp_path: Path) -> None:
    for ending in ("", "raise SystemExit(0)\n", "sys.exit()\n"):
        finished = run_unisono(f"import sys\nx = 1\n{ending}", tmp_path, workers=1, expect=10)
        assert_says(finished, "UNI-1103", "train.py ended without training", "trainer.fit()", "__main__")
        assert "Traceback" not in finished.output


def test_a_script_that_ends_on_one_worker_in_the_middle_of_the_training_says_on_which(tmp_path: Path) -> None:
    leave = "fit(callbacks=[Every(lambda step: (WORKER, step) == (1, 2) and exit())], max_steps=1000)\n"
    finished = run_unisono(SMALL + leave, tmp_path, expect=10)
    assert_says(finished, "UNI-1103", "train.py ended on worker 1 before the training was finished", "worker 1 on ")
    assert finished.output.count("UNI-") == 1


def test_a_script_that_leaves_with_a_code_says_where(tmp_path: Path) -> None:
    finished = run_unisono("import sys\n\nsys.exit(3)\n", tmp_path, expect=10)
    assert_says(finished, "UNI-1101", "sys.exit(3)", "train.py:3")


def test_an_exception_in_one_worker_is_shown_with_the_users_traceback_and_nobody_else_is_blamed(tmp_path: Path) -> None:
    fault = """
def check(step):
    if WORKER == 1 and step == 2:
        raise ValueError("a bad day [/bold] ü")


fit(callbacks=[Every(check)], max_steps=1000)
"""
    finished = run_unisono(SMALL + fault, tmp_path, expect=10)
    line = (SMALL + fault).split("raise ValueError")[0].count("\n") + 1
    assert_says(
        finished, "UNI-1101", "ValueError: a bad day [/bold] ü", "worker 1 on ", f"train.py:{line}, in check",
        "Traceback (most recent call last)", "runs/train-",
    )  # fmt: skip
    assert finished.output.count("UNI-") == 1
    assert "worker 0 on" not in finished.output
    assert "runpy" not in finished.output, "our own frames are of no interest"
    failed = finished.events_of(events.RunFailed)
    assert [(event.exit_code, event.failure["code"]) for event in failed] == [(10, "UNI-1101")]


def test_an_exception_in_a_dataset_in_a_loader_process_shows_the_users_line(tmp_path: Path) -> None:
    dataset = """
class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 30:
            raise KeyError("shard 7")  # here
        return DATA[index]


fit(data=unisono.Data(Dataset(), shuffle=False, loader_processes=1))
"""
    finished = run_unisono(SMALL + dataset, tmp_path, workers=1, expect=10)
    line = (SMALL + dataset).split("# here")[0].count("\n") + 1
    assert_says(
        finished, "UNI-1101", "KeyError: 'shard 7'", f"train.py:{line}, in __getitem__", "loader process", "30",
        "Traceback (most recent call last)",
    )  # fmt: skip


def test_a_second_training_in_one_run_is_refused(tmp_path: Path) -> None:
    finished = run_unisono(SMALL + "fit()\nfit()\n", tmp_path, workers=1, expect=11)
    assert_says(
        finished, "UNI-1201", "already trained", "one run has one", "a run of its own", "worker 0 on", "train.py:"
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("data=torch.utils.data.TensorDataset(*(t[torch.randperm(32)] for t in DATA.tensors))", "reads other data"),
        ("data=Stream(), max_steps=2", "iterable dataset gave other samples"),
    ],
    ids=["map", "iterable"],
)
def test_data_that_differs_between_workers_is_refused(data: str, says: str, tmp_path: Path) -> None:
    stream = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(os.getpid())
        while True:
            yield torch.randn(4, generator=generator), 1


torch.manual_seed(os.getpid())
"""
    finished = run_unisono(f"{SMALL}{stream}fit({data})\n", tmp_path, expect=13)
    assert_says(finished, "UNI-1401", "worker 1", says, "do   ")
    assert finished.output.count("UNI-") == 1


def on_a_disk_of(kilobytes: int) -> list[str]:
    """Run a command with a file system of its own, of that size, mounted on ./small; nobody else sees it."""
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs small"
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *as_root, "sh", "-c", f'mkdir -p small && {mount} && exec "$@"', "sh"]


def test_a_disk_that_fills_up_with_logs_stops_nothing_and_is_told_at_the_end(tmp_path: Path) -> None:
    chatty = "fit(callbacks=[Every(lambda step: print('x' * 100_000))])\n"
    usual = run_unisono(SMALL + "fit()\n", tmp_path, workers=1)
    finished = run_unisono(
        SMALL + chatty, tmp_path, "--run-dir", "small/run", workers=1, wrapper=on_a_disk_of(128), expect=30
    )
    assert_says(
        finished, "UNI-3002", "small/run is full: lost worker-0.log", "No space left", "free some space",
        "4 steps", f"sha256 {usual.weights_sha256}", "note: ",
    )  # fmt: skip


def test_a_disk_without_room_for_the_weights_loses_no_hash(tmp_path: Path) -> None:
    big = "nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 1000), nn.Linear(1000, 2))"
    finished = run_unisono(
        f"{SMALL}fit({big})\n",
        tmp_path,
        "--checkpoint-every",
        "never",
        "--run-dir",
        "small/run",
        workers=1,
        wrapper=on_a_disk_of(128),
        expect=30,
    )
    assert_says(finished, "UNI-3002", "final.safetensors", "No space left", "weights  sha256 ")


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(tmp_path: Path) -> None:
    big = "nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 1000), nn.Linear(1000, 2))"
    script, options = f"{SMALL}fit({big})\n", ("--run-dir", "small/run")
    finished = run_unisono(script, tmp_path, *options, workers=1, wrapper=on_a_disk_of(128), expect=31)
    assert_says(finished, "UNI-3012", "a checkpoint takes about", "--checkpoint-every never")
    assert [event.kind for event in finished.events if event.kind == "step_finished"] == []


def test_a_read_only_disk_is_refused_before_anything_starts(tmp_path: Path) -> None:
    read_only = [*on_a_disk_of(64)[:-2], 'mkdir -p small && mount -t tmpfs -o ro tmpfs small && exec "$@"', "sh"]
    finished = run_unisono(SMALL + "fit()\n", tmp_path, "--run-dir", "small/run", wrapper=read_only, expect=30)
    assert_says(finished, "UNI-3001", "small/run: Read-only file system", "--run-dir")
    assert_started_nothing(finished)
