# SPDX-License-Identifier: Apache-2.0
"""A rank of a replica dies: the replica leaves as one and comes back as one, and the result does not change a bit."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path

import psutil
import pytest

from chaos.recovering import set_pace
from multiproc.running import Finished, Started, run_command, run_unisono, start_unisono
from unisono.core import events
from unisono.core.errors import WorkerHung

SCRIPT = Path(__file__).parents[1] / "multiproc" / "train_decoder.py"
FOUR = ("--microbatches", "4", "--max-restarts", "20")
EPOCHS, STEPS = 10, 30
ARGUMENTS = ("slow", "dropout", f"epochs={EPOCHS}")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def of(inner: str) -> str:
        folder = tmp_path_factory.mktemp("calm")
        return run_unisono(SCRIPT, folder, "--mesh", inner, *FOUR, workers=None, script_args=ARGUMENTS).weights_sha256

    return of


def rank_of(run: Started, worker: int, rank: int) -> int:
    """The process id of a rank: the worker's own, or that of one of its children."""
    leader = psutil.Process(run.worker_pid(worker))
    if not rank:
        return leader.pid
    return next(child.pid for child in leader.children() if child.name() == f"worker-{worker}.{rank}")


def begin(folder: Path, mesh: str, *options: str) -> Started:
    set_pace(folder, 0.02)
    return start_unisono(SCRIPT, folder, "--mesh", mesh, *FOUR, *options, workers=None, script_args=ARGUMENTS)


def hurry_to_the_end(run: Started, folder: Path) -> Finished:
    set_pace(folder, 0)
    finished = run.wait(120)
    steps = [event.step for event in finished.events_of(events.StepFinished)]
    assert sorted(set(steps)) == list(range(1, STEPS + 1)), "every step happened"
    return finished


def removed(finished: Finished) -> list[tuple[int, str]]:
    return [(event.who, event.because) for event in finished.events_of(events.WorkerRemoved)]


@pytest.mark.parametrize(
    ("inner", "worker", "rank"),
    [
        ("fsdp=2", 1, 1),
        ("fsdp=2", 0, 0),
        ("tp=2", 0, 1),
        ("tp=2", 1, 0),
        ("pp=2", 1, 1),
        ("pp=2", 0, 0),
        ("fsdp=2,tp=2", 0, 2),
    ],
)
def test_a_replica_with_a_dead_rank_comes_back_as_one(inner: str, worker: int, rank: int, tmp_path: Path, calm) -> None:
    with begin(tmp_path, f"dp=2,{inner}") as run:
        run.wait_for_steps(3)
        others = [process.pid for process in psutil.Process(run.worker_pid(worker)).children()]
        os.kill(rank_of(run, worker, rank), signal.SIGKILL)
        run.until(lambda: run.events_of(events.WorkerRemoved), "the loss to be told")
        run.until(lambda: 2 in run.events_of(events.MembershipChanged)[-1].members, "the replacement")
        assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in others)
        finished = hurry_to_the_end(run, tmp_path)
    assert finished.weights_sha256 == calm(inner)
    ((gone, because),) = removed(finished)
    assert gone == worker
    assert (f"rank {rank} of worker {worker}" in because) == bool(rank), because
    assert "SIGKILL" in because
    changed = finished.events_of(events.MembershipChanged)[-1]
    assert changed.healed == [2]


def test_a_replica_that_comes_back_is_cut_where_the_others_are(tmp_path: Path) -> None:
    """By measured times, which are others when it comes back."""
    block = "        x = x + self.drop(self.attention(self.norm1(x)))\n"
    late = "        if Path('late').exists():\n            time.sleep(0.02)\n"
    script = SCRIPT.read_text().replace(block, late + block)
    set_pace(tmp_path, 0.02)
    asked = ("--mesh", "dp=2,pp=2", *FOUR)
    with start_unisono(script, tmp_path, *asked, workers=None, script_args=(*ARGUMENTS, "cost='time'")) as run:
        run.wait_for_steps(2)
        (tmp_path / "late").touch()
        os.kill(rank_of(run, 0, 0), signal.SIGKILL)
        run.until(lambda: 2 in run.events_of(events.MembershipChanged)[-1].members, "the replacement")
        (tmp_path / "late").unlink()
        finished = hurry_to_the_end(run, tmp_path)
    assert "stages begin at blocks.0, by measured times" in finished.output
    by_name = (*ARGUMENTS, "boundaries=('blocks.0',)")
    calm = run_unisono(SCRIPT, tmp_path, "--mesh", "pp=2", *FOUR, workers=None, script_args=by_name)
    assert finished.weights_sha256 == calm.weights_sha256


def test_a_rank_that_fails_is_the_story(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace(
        "    def forward(self, x: Tensor) -> Tensor:\n        keep_pace()\n",
        "    def forward(self, x: Tensor) -> Tensor:\n"
        "        if torch.distributed.get_rank() == 1 and self.training:\n"
        "            raise KeyError('the second rank alone')\n",
    )
    finished = run_unisono(script, tmp_path, "--mesh", "fsdp=2", *FOUR, workers=None, expect=10)
    assert "the second rank alone" in finished.output
    assert "train.py" in finished.output
    assert "gloo" not in finished.output.split("UNI-")[-1], finished.output


def test_replicas_join_and_leave_while_it_runs(tmp_path: Path, calm) -> None:
    with begin(tmp_path, "dp=1:3,fsdp=2", "--name", "elastic") as run:
        run.wait_for_steps(2)
        os.kill(run.worker_pid(1), signal.SIGTERM)  # it is asked to leave, with its other rank
        run.until(lambda: 1 not in run.events_of(events.MembershipChanged)[-1].members, "worker 1 to leave")
        finished = hurry_to_the_end(run, tmp_path)
    assert finished.weights_sha256 == calm("fsdp=2")
    assert any(worker == 1 for worker, _ in removed(finished))


def test_what_each_rank_has_not_sent_yet_goes_and_comes_with_its_replica(tmp_path: Path) -> None:
    """Each rank's to its like: were they mixed up, or lost, the bits would be others."""
    script = SCRIPT.read_text().replace("torch.set_default_dtype(torch.float64)", "pass")
    options = (*FOUR, "--compress", "onebit")
    calm = run_unisono(script, tmp_path, "--mesh", "dp=2,fsdp=2", *options, workers=None, script_args=ARGUMENTS)
    set_pace(tmp_path, 0.02)
    elastic = ("--mesh", "dp=1:2,fsdp=2", *options, "--name", "r")
    with start_unisono(script, tmp_path, *elastic, workers=None, script_args=ARGUMENTS) as run:
        run.wait_for_steps(3)
        run_command(tmp_path, "scale", "r", "1")
        run.until(lambda: run.events_of(events.MembershipChanged)[-1].members == [0], "worker 1 to leave")
        run_command(tmp_path, "scale", "r", "2")
        run.until(lambda: run.events_of(events.MembershipChanged)[-1].members == [0, 2], "worker 2 to come")
        finished = hurry_to_the_end(run, tmp_path)
    assert finished.weights_sha256 == calm.weights_sha256
    assert not [event for event in finished.events_of(events.Notice) if event.code.startswith("carried")]


def stuck(rank: int, how: str) -> str:
    return SCRIPT.read_text().replace(
        "        keep_pace()\n",
        "        keep_pace()\n"
        f"        if torch.distributed.get_rank() == {rank} and Path('hang').exists():\n"
        "            with contextlib.suppress(FileNotFoundError):\n"
        "                Path('hang').unlink()\n"
        f"                {how}  # STUCK\n",
    )


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path, calm) -> None:
    """Not the first one's line, which waits for it."""
    set_pace(tmp_path, 0.02)
    options = ("--mesh", "dp=2,fsdp=2", *FOUR, "--hang-after", "2")
    with start_unisono(stuck(1, "time.sleep(600)"), tmp_path, *options, workers=None, script_args=ARGUMENTS) as run:
        run.wait_for_steps(3)
        (tmp_path / "hang").touch()
        run.until(lambda: run.events_of(events.Diagnosed), "the hang to be found")
        finished = hurry_to_the_end(run, tmp_path)
    assert finished.weights_sha256 == calm("fsdp=2")
    (found,) = finished.events_of(events.Diagnosed)
    where = found.failure["where"]
    assert where.startswith("it is waiting for its rank 1, for"), where
    assert "STUCK" in where, where


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (1, "time.sleep(600)", "it is waiting for its rank 1, for"),
        (1, "while True: pass", "it is waiting for its rank 1, for"),
        (0, "time.sleep(600)", "keeping its other ranks waiting, for"),
    ],
)
def test_a_rank_that_hangs_ends_a_run_of_one_replica_instead_of_keeping_it_silent(
    tmp_path: Path, rank: int, how: str, words: str
) -> None:
    """Nobody else waits for it, and nobody else has the state."""
    set_pace(tmp_path, 0.02)
    options = ("--mesh", "fsdp=2", *FOUR, "--hang-after", "3")
    with start_unisono(stuck(rank, how), tmp_path, *options, workers=None, script_args=ARGUMENTS) as run:
        run.wait_for_steps(3)
        (tmp_path / "hang").touch()
        finished = run.wait(60, expect=WorkerHung.exit_code)
    last = finished.output[finished.output.rindex("UNI-") :]
    assert last.startswith("UNI-2003  worker 0 on"), last
    assert words in last
    assert "STUCK" in last


def test_a_replica_that_comes_back_knows_the_loss_scale(tmp_path: Path) -> None:
    """Steps were skipped before the rank died; the new ranks go on with the scale that came of it."""
    script = (
        SCRIPT.read_text()
        .replace("torch.set_default_dtype(torch.float64)", "pass")
        .replace("return nn.functional.cross_entropy", "return 66 * nn.functional.cross_entropy")
    )
    options = ("--precision", "fp16", *FOUR)
    calm = run_unisono(script, tmp_path, "--mesh", "fsdp=2", *options, workers=None, script_args=ARGUMENTS)
    set_pace(tmp_path, 0.02)
    with start_unisono(script, tmp_path, "--mesh", "dp=2,fsdp=2", *options, workers=None, script_args=ARGUMENTS) as run:
        run.until(lambda: len(run.events_of(events.StepFinished)) >= 2, "steps that are not skipped")
        os.kill(rank_of(run, 1, 1), signal.SIGKILL)
        run.until(lambda: 2 in run.events_of(events.MembershipChanged)[-1].members, "the replacement")
        set_pace(tmp_path, 0)
        finished = run.wait(120)
    assert calm.result is not None
    assert finished.result is not None
    assert finished.weights_sha256 == calm.weights_sha256
    assert finished.result["skipped_steps"] == calm.result["skipped_steps"] > 0
