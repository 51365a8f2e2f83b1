# SPDX-License-Identifier: Apache-2.0
"""Whatever happens during a save or to a store: the next start has a complete, verified checkpoint, and a recent one.

First a process that only saves, killed or with a failing disk at many seeded moments (bench/crashes.py has two hundred
of them); then whole runs whose checkpoints are damaged, or whose disk fails while they train.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chaos.crashing import ENDS, FAILING, FULL, KILL, STYLES, Moment, Outcome, Saver, advance, draw, in_a_process
from multiproc.running import Finished, run_unisono, start_unisono
from multiproc.scripts import SMALL
from unisono.checkpoint.chunks import assign, plan_chunks
from unisono.checkpoint.listing import list_steps, read_manifest
from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.manifest import StoredChunk, step_key
from unisono.checkpoint.parts import Part, put_part
from unisono.checkpoint.reading import verify
from unisono.core import events
from unisono.train.saving import Keeping

TESTS = Path(__file__).resolve().parents[1]
NO_HANG_S = 60.0
AS_ROOT = [] if os.geteuid() == 0 else ["--map-root-user"]


# --- a process that saves, and what is left of it


def strike(folder: Path, moments: int, *ends: str) -> list[tuple[Moment, Outcome]]:
    results = list(in_a_process(folder, moments, 0, STYLES, ends))
    assert len(results) == moments
    return results


def assert_all_well(results: list[tuple[Moment, Outcome]]) -> None:
    wrong = [f"{moment}: {text}" for moment, outcome in results for text in outcome.wrong]
    assert wrong == []
    for moment, outcome in results:
        assert outcome.found >= outcome.committed > 0, moment
        assert outcome.unnamed_bytes == 0, f"{moment}: rubble is left, and will be more after the next"
        assert outcome.again_s < NO_HANG_S


def test_a_save_that_is_killed_at_any_moment_leaves_a_checkpoint_no_older_than_the_last(tmp_path: Path) -> None:
    results = strike(tmp_path, 40, KILL)
    assert_all_well(results)
    hit = Counter(outcome.interrupted for _, outcome in results)
    assert len(hit) >= 3, f"the moments were all alike: {hit}"
    assert hit.total() - hit["before its first file"] >= 20, f"too few in the middle of a save: {hit}"


def test_a_disk_that_begins_to_fail_at_any_moment_costs_no_checkpoint(tmp_path: Path) -> None:
    results = strike(tmp_path, len(FAILING) * len(STYLES), *FAILING)
    assert_all_well(results)
    assert {(moment.end, moment.style) for moment, _ in results} == {(end, s) for end in FAILING for s in STYLES}
    for moment, outcome in results:
        assert all("Input/output error" in text for text in outcome.failures), moment


def test_a_disk_that_fills_up_at_any_moment_costs_no_checkpoint(tmp_path: Path) -> None:
    results = strike(tmp_path, 6, FULL)
    assert_all_well(results)
    for moment, outcome in results:
        assert all("No space left on device" in text for text in outcome.failures), moment
        assert all("cannot write chunks/" in text or "steps/" in text or "parts/" in text for text in outcome.failures)


def test_every_way_to_end_has_its_moments() -> None:
    drawn = [draw(number, 0, STYLES, ENDS) for number in range(len(STYLES) * len(ENDS))]
    assert {(moment.style, moment.end) for moment in drawn} == {(style, end) for style in STYLES for end in ENDS}
    assert [draw(number, 0, STYLES, ENDS) for number in range(len(drawn))] == drawn


@pytest.mark.parametrize("keeping", [Keeping(last=1), Keeping(last=1, every=10), Keeping(last=2)])
def test_what_was_just_saved_stays_although_a_damaged_checkpoint_of_a_later_step_is_there(
    keeping: Keeping, tmp_path: Path
) -> None:
    """After falling back, a run that saves by the clock meets other steps than the first time."""
    saver = Saver(tmp_path, Keeping(last=2))
    for step in (10, 20):
        save_at(saver, step)
    newest = read_manifest(saver.store, 20)
    flip_a_byte(tmp_path / newest.chunks[newest.tensors["model.large.0"].pieces[0].chunk].key)
    again = Saver(tmp_path, keeping)
    assert again.trusted == 10, "the damaged one is passed over"
    for step in (13, 16):
        save_at(again, step)
        assert Saver(tmp_path, keeping).trusted == step


def save_at(saver: Saver, step: int) -> None:
    saver.step = step
    advance(saver.state, step)
    saver.save_and_wait(lambda _: None)


# --- whole runs

# What is frozen has a chunk of its own, which all checkpoints share. With a file called "hold" each save has ended, and
# all have heard of it, before the next is due, and step 23 does not end; "act" names what is to happen after step 12.
SCRIPT = (
    SMALL
    + """
import subprocess
import sys
import threading

ACT = Path("act").read_text() if Path("act").exists() else ""
STORE = Path(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(300_000), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x) * self.frozen.mean()


def after(step):
    if Path("hold").exists():
        while step % 5 == 3 and any(thread.name == "unisono-checkpoint" for thread in threading.enumerate()):
            time.sleep(0.01)
        time.sleep(600 if step == 23 else 0)
    if ACT:
        time.sleep(0.02)
        act(step)


def act(step):
    if step == (0 if "read" in ACT else 12) and ACT.startswith("fail") and WORKER in map(int, ACT.split()[2:]):
        sys.path.insert(0, os.environ["TESTS"])
        from chaos.failing_calls import fail_from_now_on
        fail_from_now_on(ACT.split()[1])
    if step == 12 and ACT == "read-only" and WORKER == 0:
        while subprocess.run(["mount", "-o", "remount,bind,ro", STORE]).returncode:
            time.sleep(0.01)  # busy: refused as long as a file there is open for writing
    if step == 12 and ACT.startswith("fill") and WORKER == 0:
        with (STORE.parent / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    if step == 27 and ACT == "fill and free" and WORKER == 0:
        (STORE.parent / "filler").unlink()
    if step == 12 and ACT == "lose the frozen chunk" and WORKER == 0:
        max(STORE.glob("chunks/*/*"), key=lambda path: path.stat().st_size).unlink()


act(0)
fit(Net(), torch.optim.AdamW, max_steps=40, callbacks=[Every(after)])
"""
)
HERE = "runs/r/checkpoints"
OPTIONS = ("--name", "r", "--microbatches", "4", "--checkpoint-every", "5", "--keep", "3")


def run(folder: Path, expect: int = 0, workers: int = 2, wrapper: list[str] | None = None, to: str = "") -> Finished:
    options = (*OPTIONS, *(("--checkpoint-to", to) if to else ()))
    return run_unisono(
        SCRIPT, folder, *options, workers=workers, script_args=[to or HERE], timeout_s=NO_HANG_S, expect=expect,
        wrapper=wrapper or (), env={"TESTS": str(TESTS)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def calm_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("calm"), workers=1).weights_sha256


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after step 22, with good checkpoints of steps 10, 15 and 20."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "hold").touch()
    with start_unisono(SCRIPT, folder, *OPTIONS, script_args=[HERE]) as started:
        store = LocalStore(folder / HERE)
        started.until(lambda: list_steps(store) == [10, 15, 20] and not store.list("parts"), "three checkpoints")
        started.send(signal.SIGKILL)
        started.wait(expect=-signal.SIGKILL)
    (folder / "hold").unlink()
    return folder


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed, tmp_path / "copy")


def manifest_file(folder: Path, step: int) -> Path:
    return folder / HERE / step_key(step)


def chunk_file(folder: Path, step: int) -> Path:
    """One that no other checkpoint has."""
    store = LocalStore(folder / HERE)
    chunks = {at: set(read_manifest(store, at).chunks.items()) for at in list_steps(store)}
    own = chunks[step].difference(*(others for at, others in chunks.items() if at != step))
    return folder / HERE / min(chunk.key for _, chunk in own)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


Find, Damage = Callable[[Path, int], Path], Callable[[Path], None]


@pytest.mark.parametrize(
    ("of_20", "of_15", "says"),
    [
        ((chunk_file, flip_a_byte), (manifest_file, flip_a_byte), "its hash is another one"),
        ((manifest_file, cut_in_half), (chunk_file, cut_in_half), "its hash is not that of its contents"),
        ((chunk_file, Path.unlink), (manifest_file, empty), "is missing"),
    ],
    ids=["flipped bytes", "truncated", "deleted chunk and empty manifest"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_word_and_the_bits_stay(
    of_20: tuple[Find, Damage], of_15: tuple[Find, Damage], says: str, folder: Path, calm_hash: str
) -> None:
    doomed = [(damage, find(folder, step)) for step, (find, damage) in ((20, of_20), (15, of_15))]
    for damage, path in doomed:
        damage(path)
    finished = run(folder)
    assert [event.step for event in finished.events_of(events.Resumed)] == [10]
    notices = [event.text for event in finished.events_of(events.Notice) if event.code == "checkpoint-passed-over"]
    assert ["step 20" in notices[0], "step 15" in notices[-1], len(notices)] == [True, True, 2], notices
    assert says in notices[0]
    assert all("\n" not in text and text in finished.output.replace("\n", " ") for text in notices), "told in the run"
    assert finished.weights_sha256 == calm_hash
    assert_all_good(folder, but=(15, 20))


def test_a_deleted_manifest_leaves_the_one_before_it_and_is_missed(folder: Path, calm_hash: str) -> None:
    manifest_file(folder, 20).unlink()
    finished = run(folder)
    assert [event.step for event in finished.events_of(events.Resumed)] == [15]
    assert finished.weights_sha256 == calm_hash
    (missed,) = [event.text for event in finished.events_of(events.Notice) if event.code == "checkpoint-passed-over"]
    assert "step 20" in missed, "the run had told that it was saved"
    assert_all_good(folder)


def test_a_run_of_which_no_checkpoint_is_good_does_not_begin_anew_by_itself(folder: Path) -> None:
    flip_a_byte(max((folder / HERE).glob("chunks/*/*"), key=lambda path: path.stat().st_size))  # all of them have it
    finished = run(folder, expect=32)
    assert "UNI-3021" in finished.output
    assert "none of the checkpoints in" in finished.output
    assert all(f"step {step}" in finished.output for step in (10, 15, 20))
    assert finished.output.count("UNI-") == 1
    steps = [event.step for event in finished.events_of(events.StepFinished)]
    assert steps == list(range(1, steps[-1] + 1)), "nothing was trained again"
    assert steps[-1] < 24


def test_a_disk_that_cannot_be_read_is_an_error_and_no_reason_to_go_back(folder: Path) -> None:
    (folder / "act").write_text("fail read 0 1")
    finished = run(folder, expect=31)
    assert "UNI-3010" in finished.output
    assert "cannot read chunks/" in finished.output
    assert finished.events_of(events.Resumed) == []


def assert_all_good(folder: Path, at: str = HERE, last: int = 40, but: Sequence[int] = ()) -> None:
    """`but`: those that were damaged, which a run leaves where they are."""
    store = LocalStore(folder / at)
    assert list_steps(store)[-1] == last
    for step in set(list_steps(store)).difference(but):
        assert verify(store, read_manifest(store, step)) == [], step


def newest_told(finished: Finished) -> int:
    """The last step of which the run said that it was saved. One that comes too soon waits for the one before it."""
    return max(event.step for event in finished.events_of(events.CheckpointSaved))


def failed_saves(finished: Finished) -> list[events.CheckpointFailed]:
    return finished.events_of(events.CheckpointFailed)


@pytest.mark.parametrize("who", ["0", "1"])
def test_a_run_whose_disk_fails_trains_to_its_end_says_what_and_can_go_on_later(
    who: str, tmp_path: Path, calm_hash: str
) -> None:
    (tmp_path / "act").write_text(f"fail fsync {who}")
    finished = run(tmp_path, expect=31)
    assert finished.weights_sha256 == calm_hash
    assert "UNI-3010" in finished.output
    assert "Input/output error" in finished.output
    assert all("cannot write" in event.failure["what"] for event in failed_saves(finished))
    (tmp_path / "act").unlink()
    told = newest_told(finished)  # before the same record goes on
    again = run(tmp_path)
    (resumed,) = again.events_of(events.Resumed)
    assert resumed.step >= told, "one whose last fsync failed may be there all the same, whole and untold"
    assert again.weights_sha256 == calm_hash
    assert_all_good(tmp_path)


def test_a_run_whose_store_becomes_read_only_trains_to_its_end(tmp_path: Path, calm_hash: str) -> None:
    (tmp_path / "act").write_text("read-only")
    (tmp_path / "store").mkdir()
    bind = 'mount --bind store store && exec "$@"'
    finished = run(tmp_path, 31, wrapper=["unshare", "--mount", *AS_ROOT, "sh", "-c", bind, "sh"], to="store")
    assert "UNI-3013" in finished.output
    assert "Read-only file system" in finished.output
    assert finished.weights_sha256 == calm_hash
    assert_all_good(tmp_path, "store", last=newest_told(finished))


def on_a_disk(megabytes: int) -> list[str]:
    """On ./small; what is on it when the run ends is kept in ./kept."""
    mount = f"mkdir -p small && mount -t tmpfs -o size={megabytes}m tmpfs small"
    script = f'{mount} && "$@"; code=$?; cp -r small kept; exit $code'
    return ["unshare", "--mount", *AS_ROOT, "sh", "-c", script, "sh"]


@pytest.mark.parametrize("act", ["fill", "fill and free"])
def test_a_disk_that_fills_up_stops_no_training_and_is_told_unless_a_later_save_succeeds(
    act: str, tmp_path: Path, calm_hash: str
) -> None:
    (tmp_path / "act").write_text(act)
    lasts = act == "fill"
    run(tmp_path, expect=31 if lasts else 0, wrapper=on_a_disk(6), to="small/store")
    record = Finished(0, (tmp_path / "output-1.txt").read_text(), tmp_path / "runs" / "r", 0.0)
    assert record.weights_sha256 == calm_hash
    failures = failed_saves(record)
    assert failures
    for event in failures:
        assert event.failure["code"] == "UNI-3012"
        assert "small/store: No space left on device" in event.failure["what"]
        assert event.failure["what"].startswith(("cannot write chunks/", "cannot write parts/", "cannot write steps/"))
    assert "UNI-3012" in record.output
    assert_all_good(tmp_path, "kept/store", last=newest_told(record))
    assert newest_told(record) < 13 if lasts else newest_told(record) == 40


def test_a_chunk_that_goes_from_under_a_run_is_written_again(tmp_path: Path, calm_hash: str) -> None:
    (tmp_path / "act").write_text("lose the frozen chunk")
    finished = run(tmp_path)
    (first, *_) = failed_saves(finished)
    assert "chunks/" in first.failure["what"]
    assert newest_told(finished) == 40
    assert finished.weights_sha256 == calm_hash
    assert_all_good(tmp_path)


def test_parts_that_a_killed_save_of_other_writers_has_left_disturb_nobody(folder: Path, calm_hash: str) -> None:
    """Three workers were killed after two of them had written; two go on, and come to the same step."""
    store = LocalStore(folder / HERE)
    specs = read_manifest(store, 20).specs
    for step in range(25, 41, 5):
        for writer, plans in enumerate(assign(plan_chunks(specs), 3)[:2]):
            rubbish = {plan.id: StoredChunk(f"{writer:064x}", plan.bytes) for plan in plans}
            put_part(store, step, 1, writer, Part(rubbish))
    finished = run(folder)
    assert failed_saves(finished) == []
    assert finished.weights_sha256 == calm_hash
    assert store.list("parts") == []
    assert_all_good(folder)
