# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run, read from its events; here on a stream that is no terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.errors import NonFiniteLoss
from unisono.core.events import Configured, Evaluated, Event, Notice, RunFinished, RunStarted, StepFinished, StepSkipped
from unisono.core.progress import PARTS, Progress, duration, format_metrics, shares
from unisono.core.run_dir import RunDir

RUN = RunDir(Path("runs/mine"))
HASH = "ab" * 32
JOB = {
    "parameters": 61_706, "batch_size": 256, "microbatches": 4, "optimizer": "SGD", "seed": 0, "threads": 1,
    "exact": True,
}  # fmt: skip
RESULT = {
    "steps": 1200, "samples": 60_000, "seconds": 75.0, "metrics": {"loss": 0.125, "accuracy": 0.9875},
    "weights_sha256": HASH,
}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.04, "0.0 s"),
        (1.26, "1.3 s"),
        (9.9, "9.9 s"),
        (10, "10 s"),
        (59.9, "59 s"),
        (60, "1:00 min"),
        (61.5, "1:01 min"),
        (3599, "59:59 min"),
        (3600, "1:00 h"),
        (5400, "1:30 h"),
        (360_000, "100:00 h"),
    ],
)
def test_a_duration_reads_like_this(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ({}, [0, 0, 0, 0]),
        ({"0": {"data": 0.0, "compute": 0.0}}, [0, 0, 0, 0]),
        ({"0": {"data": 1.0, "compute": 2.0, "communication": 0.5, "waiting": 0.5}}, [0.25, 0.5, 0.125, 0.125]),
        ({"0": {"compute": 3.0}, "1": {"compute": 1.0, "waiting": 4.0}}, [0, 0.5, 0, 0.5]),
        ({"0": {"compute": 1.0, "dreaming": 9.0}}, [0, 1, 0, 0]),
    ],
)
def test_shares_are_parts_of_all_workers_time(timings: dict[str, dict[str, float]], expected: list[float]) -> None:
    assert list(shares(timings).values()) == expected
    assert tuple(shares(timings)) == PARTS


times = st.fixed_dictionaries({part: st.floats(0, 1e6) for part in PARTS})


@given(st.dictionaries(st.sampled_from("0123"), times, min_size=1))
def test_shares_add_up_to_one(timings: dict[str, dict[str, float]]) -> None:
    values = list(shares(timings).values())
    worked = any(sum(row.values()) for row in timings.values())
    assert sum(values) == pytest.approx(1.0 if worked else 0.0)
    assert all(0 <= value <= 1 for value in values)


def test_accuracy_is_a_percentage_and_other_metrics_are_numbers() -> None:
    assert format_metrics({"loss": 0.12345, "accuracy": 0.9875}) == "loss 0.1235  accuracy 98.75 %"
    assert format_metrics({}) == ""


def started(workers: int = 2) -> RunStarted:
    return RunStarted(name="mine", script="train.py", workers=workers, host="box", pid=1)


def configured(**changes: Any) -> Configured:
    return Configured(job=JOB | changes, fingerprint={}, steps_total=100, samples_per_epoch=1437)


def step(number: int, time_s: float = 0.0) -> StepFinished:
    timings = {"0": {"data": 0.1, "compute": 0.6, "communication": 0.2, "waiting": 0.1}}
    return StepFinished(
        time_s=time_s, step=number, epoch=1, loss=0.5, samples=256 * number, lr=0.1, seconds=0.5, timings=timings
    )


def shown(*events: Event) -> list[str]:
    stream = io.StringIO()
    progress = Progress(RUN, stream)
    for event in events:
        progress.handle(event)
    progress.close()
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_a_finished_run_reads_like_this() -> None:
    evaluated = Evaluated(step=100, epoch=1, metrics={"loss": 0.125, "accuracy": 0.9875}, seconds=0.1)
    assert shown(started(), configured(), step(1), evaluated, RunFinished(result=RESULT)) == [
        "run mine: 2 workers on box",
        "61,706 parameters, 1,437 samples, batch 256 in 4 microbatches, SGD, seed 0, threads a worker 1, exact",
        "step 1/100 epoch 1 loss 0.5000 512 samples/s data 10% compute 60% comm 20% wait 10%",
        "epoch 1 step 100 eval loss 0.1250 accuracy 98.75 %",
        "done 1,200 steps, 60,000 samples in 1:15 min (800 samples/s)",
        "metrics loss 0.1250 accuracy 98.75 %",
        f"weights sha256 {HASH}",
        "run runs/mine",
    ]


def test_the_hash_of_the_weights_is_on_one_line_for_scripts_to_find() -> None:
    lines = shown(started(), configured(), step(1), RunFinished(result=RESULT))
    assert [line.split()[-1] for line in lines if line.startswith("weights")] == [HASH]
    assert sum(HASH in line for line in lines) == 1


def test_a_single_worker_is_not_called_workers() -> None:
    assert shown(started(1)) == ["run mine: 1 worker on box"]


def test_a_run_that_is_not_exact_says_so_before_it_starts() -> None:
    assert shown(configured(exact=False))[0].endswith("not exact: bits depend on the number of workers")


def test_steps_are_not_all_printed_but_the_last_one_is() -> None:
    lines = [line for line in shown(configured(), *map(step, range(1, 101))) if line.startswith("step")]
    assert len(lines) < 10
    assert lines[0].startswith("step 1/100 ")
    assert lines[-1].startswith("step 100/100 ")


def test_speed_and_time_left_come_from_the_last_steps() -> None:
    first = [step(number, time_s=0.5 * number) for number in range(1, 50)]
    stream = io.StringIO()
    progress = Progress(RUN, stream)
    progress.handle(Configured(job=JOB, fingerprint={}, steps_total=50, samples_per_epoch=None))
    for event in [*first, step(50, time_s=25.0)]:
        progress.handle(event)
    last = stream.getvalue().splitlines()[-1]
    assert "512 samples/s" in last
    assert "left 0.0 s" in last


def test_time_left_counts_steps_where_an_event_stands_for_a_round_of_them() -> None:
    progress = Progress(RUN, io.StringIO())
    progress.handle(Configured(job=JOB, fingerprint={}, steps_total=160, samples_per_epoch=None))
    for number in range(1, 6):  # 16 steps in 8 s
        progress.handle(step(16 * number, time_s=8.0 * number))
    assert progress._status().startswith("step 80/160 ")
    assert progress._status().endswith("left 40 s")


def test_notes_and_skipped_steps_are_told() -> None:
    lines = shown(Notice(code="x", text="two workers share a disk"), StepSkipped(step=3, because="the loss is nan"))
    assert lines == ["note: two workers share a disk", "skipped: the loss is nan"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"skipped_steps": 2}, "1,200 steps, 2 skipped, 60,000 samples"),
        ({"stopped_early": "loss has not improved"}, "(stopped early: loss has not improved)"),
        ({"metrics": {}}, "metrics none: no eval_data was given"),
        ({"seconds": 0.0}, "(0 samples/s)"),
    ],
)
def test_what_was_unusual_about_a_run_is_in_its_last_lines(changes: dict[str, Any], text: str) -> None:
    assert text in "\n".join(shown(RunFinished(result=RESULT | changes)))


def test_a_failure_is_the_last_thing_on_the_screen_below_the_users_traceback() -> None:
    stream = io.StringIO()
    Progress(RUN, stream).show_failure(NonFiniteLoss("the loss is nan", do="lower the learning rate"), "Traceback\n")
    text = stream.getvalue()
    assert text.startswith("Traceback\n\nUNI-1301  the loss is nan\n  do      lower the learning rate\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_same_facts_and_brackets_of_the_user_as_they_are() -> None:
    stream = Terminal()
    progress = Progress(RUN, stream)
    told = [started(), configured(), step(1), Notice(code="x", text="look at [red]this[/red] :smile:"), step(100)]
    for event in [*told, RunFinished(result=RESULT)]:
        progress.handle(event)
    progress.close()
    text = stream.getvalue()
    assert "run mine: 2 workers on box" in text
    assert "note: look at [red]this[/red] :smile:" in text
    assert text.count(HASH) == 1


def test_a_stream_that_breaks_does_not_end_the_training() -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115  closing it would fail, as it should
    progress = Progress(RUN, stream)
    for event in (started(), configured(), step(1), RunFinished(result=RESULT)):
        progress.handle(event)
    progress.close()
    stream.close()
