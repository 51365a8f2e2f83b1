# SPDX-License-Identifier: Apache-2.0
"""The spec of a run: what may be asked for, what is refused and with which code, and spec files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.errors import BatchTooSmall, TooFewMicrobatches, UnisonoError, UnknownKey, UsageError
from unisono.core.events import Configured
from unisono.core.run_dir import Recorder, create
from unisono.core.spec import (
    JobSpec,
    RunSpec,
    Workers,
    build_run_spec,
    default_microbatches,
    parse_workers,
    read_spec_file,
    resolve_microbatches,
    why_not_exact,
)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("1", 1, 1), ("4", 4, 4), (4, 4, 4), (" 4 ", 4, 4), ("2:8", 2, 8), ("3:3", 3, 3), ("007", 7, 7)],
)
def test_workers_are_a_number_or_a_minimum_and_a_maximum(text: str | int, low: int, high: int) -> None:
    assert parse_workers(text) == Workers(min=low, max=high)


@pytest.mark.parametrize("text", ["", "four", "-1", "1.5", "2:", ":2", "1:2:3", "1 2", "0", "0:4", "4:0", "8:2", True])
def test_workers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_workers(text)
    assert (caught.value.code, caught.value.exit_code) == ("UNI-1001", 2)
    assert str(text) in caught.value.what


@pytest.mark.parametrize("text", ["x", "0", "0:4", "4:0", "8:2"])
def test_what_is_suggested_instead_of_wrong_workers_works(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_workers(text)
    suggested = caught.value.do.removeprefix("write --workers ").split()[0]
    assert parse_workers(suggested).min >= 1


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_workers_survive_being_written_down(low: int, more: int) -> None:
    workers = Workers(min=low, max=low + more)
    assert parse_workers(workers.model_dump()) == workers
    assert RunSpec(workers=workers) == RunSpec(**json.loads(json.dumps(RunSpec(workers=workers).model_dump())))


@pytest.mark.parametrize(
    ("max_workers", "batch", "microbatches"),
    [(1, 64, 4), (2, 64, 4), (4, 64, 4), (5, 64, 5), (8, 64, 8), (1, 3, 3), (1, 1, 1), (2, 2, 2)],
)
def test_without_a_word_up_to_four_workers_share_their_microbatches(
    max_workers: int, batch: int, microbatches: int
) -> None:
    assert default_microbatches(max_workers, batch) == microbatches
    assert resolve_microbatches(None, max_workers, batch) == microbatches


@pytest.mark.parametrize(
    ("asked", "max_workers", "batch", "kind", "code", "numbers"),
    [
        (2, 4, 64, TooFewMicrobatches, "UNI-1202", ["2", "4"]),
        (0, 1, 64, TooFewMicrobatches, "UNI-1202", ["0", "1"]),
        (-3, 1, 64, TooFewMicrobatches, "UNI-1202", ["-3", "1"]),
        (16, 4, 8, BatchTooSmall, "UNI-1203", ["16", "8"]),
        (None, 8, 4, BatchTooSmall, "UNI-1203", ["8", "4"]),
    ],
)
def test_microbatches_that_cannot_be_are_refused_with_the_arithmetic(
    asked: int | None, max_workers: int, batch: int, kind: type[UnisonoError], code: str, numbers: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        resolve_microbatches(asked, max_workers, batch)
    assert (caught.value.code, caught.value.exit_code) == (code, 11)
    assert all(number in caught.value.what for number in numbers)
    assert "--workers 0" not in caught.value.do
    assert "--workers -" not in caught.value.do


@given(st.none() | st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_every_worker_gets_a_microbatch_and_every_microbatch_a_sample(
    asked: int | None, max_workers: int, batch: int
) -> None:
    try:
        microbatches = resolve_microbatches(asked, max_workers, batch)
    except (TooFewMicrobatches, BatchTooSmall):
        assert (asked or max_workers) > batch or (asked or max_workers) < max_workers
    else:
        assert max_workers <= microbatches <= batch
        assert asked in (None, microbatches)


@pytest.mark.parametrize(
    ("key", "hint"), [("wokers", "did you mean 'workers'?"), ("thread", "did you mean 'threads'?"), ("xyzzy", "")]
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, hint: str) -> None:
    with pytest.raises(UnknownKey) as caught:
        build_run_spec({"script": "train.py", key: 1}, "job.toml")
    assert (caught.value.code, caught.value.exit_code) == ("UNI-1002", 2)
    assert caught.value.what == f"job.toml: unknown key {key!r}" + (f"; {hint}" if hint else "")
    assert "microbatches" in caught.value.do


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("microbatches", 0),
        ("stop_after", 0),
        ("microbatches", "many"),
        ("threads", 0),
        ("threads", 1.5),
        ("seed", -1),
        ("device", "gpu"),
        ("name", "../elsewhere"),
        ("name", "-x"),
        ("name", "a b"),
        ("name", "n" * 65),
        ("args", "--lr"),
        ("max_restarts", -1),
        ("rejoin_within", -0.5),
        ("hang_after", 0),
        ("grace", 0),
        ("verify_every", -1),
        ("noise_every", -1),
        ("balance", "sometimes"),
        ("local", 0),
        ("workers", 2.5),
        ("workers", {"min": 8, "max": 2}),
    ],
)
def test_a_value_that_makes_no_sense_names_the_source_and_the_key(key: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        build_run_spec({key: value}, "job.toml")
    assert caught.value.code == "UNI-1001"
    assert caught.value.what.startswith(f"job.toml: {key}")


def test_the_keys_of_a_run_have_these_defaults() -> None:
    spec = build_run_spec({}, "nothing")
    assert spec.model_dump() == {
        "script": "",
        "args": (),
        "name": "",
        "run_dir": "",
        "workers": "1",
        "microbatches": None,
        "stop_after": None,
        "threads": 1,
        "seed": None,
        "device": "auto",
        "max_restarts": 10,
        "rejoin_within": 300.0,
        "hang_after": 60.0,
        "grace": 30.0,
        "verify_every": 100,
        "noise_every": None,
        "balance": True,
        "faults": "",
        "listen": "",
        "local": None,
        "checkpoint_every": "10m",
        "checkpoint_to": "",
        "checkpoint_key": "",
        "keep": 2,
        "keep_every": None,
        "keep_best": "",
        "resume": "auto",
        "comm": "auto",
        "backend": "auto",
        "compress": "",
        "strategy": "",
        "local_steps": None,
        "outer": "",
        "fragments": None,
        "servers": None,
        "local_servers": None,
        "staleness": "",
        "copies": None,
        "delayed": "",
        "fresh": "",
        "round_steps": None,
        "mesh": "",
        "zero": None,
        "offload": False,
        "schedule": "",
        "chunks": None,
        "plaintext": False,
        "precision": "",
        "compile": "",
        "recompute": "",
    }


@pytest.mark.parametrize(("staleness", "round_steps"), [("16", None), ("100", None), ("4", 4), ("1", 1)])
def test_a_bound_that_a_round_never_reaches_is_refused_with_the_round_that_it_needs(
    staleness: str, round_steps: int | None
) -> None:
    asked = {"strategy": "ps", "staleness": staleness, "round_steps": round_steps}
    with pytest.raises(UsageError) as caught:
        build_run_spec(asked, "job.toml")
    needed = int(staleness) + 1
    for words in (
        f"staleness {staleness} cannot",
        f"{(round_steps or 16) - 1} apart",
        f"--round-steps {needed}",
        "inf",
    ):
        assert words in caught.value.what
    assert build_run_spec(asked | {"round_steps": needed}, "job.toml").bound == needed - 1


@pytest.mark.parametrize(("staleness", "round_steps"), [("15", None), ("inf", None), ("inf", 1), ("0", None), ("3", 4)])
def test_a_bound_within_the_round_is_taken(staleness: str, round_steps: int | None) -> None:
    build_run_spec({"strategy": "ps", "staleness": staleness, "round_steps": round_steps}, "job.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.toml", 'script = "train.py"\nworkers = "2:4"\nseed = 7\nargs = ["--lr", "0.1"]\n'),
        ("job.json", '{"script": "train.py", "workers": "2:4", "seed": 7, "args": ["--lr", "0.1"]}'),
        ("job", '{"script": "train.py", "workers": "2:4", "seed": 7, "args": ["--lr", "0.1"]}'),
    ],
)
def test_a_spec_file_is_toml_or_json(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    spec = build_run_spec(read_spec_file(tmp_path / name), name)
    assert spec == RunSpec(script="train.py", workers=Workers(min=2, max=4), seed=7, args=("--lr", "0.1"))


def test_a_spec_file_may_ask_for_a_mesh(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('script = "train.py"\nmesh = "dp=1:3,fsdp=4"\n')
    spec = build_run_spec(read_spec_file(tmp_path / "job.toml"), "job.toml")
    assert (spec.mesh, spec.workers) == ("fsdp=4", Workers(min=1, max=3))


def test_measured_stages_are_something_else_that_bits_depend_on() -> None:
    job = JobSpec(microbatches=4, batch_size=8, seed=0, threads=1).model_dump(mode="json")
    assert why_not_exact(job) == ""
    assert "measured times" in why_not_exact(job | {"measured_stages": ["blocks.1"]})


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("job.toml", b"workers = = 4", "is not valid TOML"),
        ("job.json", b"{workers: 4}", "is not valid JSON"),
        ("job.yaml", b"workers: 4", "is not valid JSON"),
        ("job.json", b"\xff\xfe{}", "is not valid JSON"),
        ("job.toml", b"\xff\xfe", "is not valid TOML"),
        ("job.json", b"[1, 2]", "does not hold a table of keys"),
        ("missing.toml", None, "cannot read the spec file"),
    ],
)
def test_a_spec_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes | None, why: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_spec_file(path)
    assert caught.value.code == "UNI-1001"
    assert why in caught.value.what
    assert str(path) in caught.value.what


def test_the_spec_of_a_run_can_be_run_again_with_what_it_settled_on(tmp_path: Path) -> None:
    asked = RunSpec(script="train.py", args=("--lr", "0.1"), workers=Workers(min=1, max=2), run_dir=str(tmp_path / "a"))
    spec, run_dir = create(asked, 0.0)
    recorder = Recorder(run_dir, spec)
    recorder.start()
    assert build_run_spec(read_spec_file(run_dir.spec), "spec.json") == asked.model_copy(update={"run_dir": ""})

    job = JobSpec(microbatches=4, batch_size=64, seed=11, threads=1)
    recorder.handle(Configured(job=job.model_dump(), fingerprint={}, steps_total=1, samples_per_epoch=64))
    recorder.close()
    again = build_run_spec(read_spec_file(run_dir.spec), "spec.json")
    assert again == asked.model_copy(update={"run_dir": "", "microbatches": 4, "seed": 11})


@pytest.mark.parametrize("content", [{"run": 3, "job": None}, {"run": {}, "job": {}, "more": 1}])
def test_a_file_that_only_looks_like_the_spec_of_a_run_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UnknownKey):
        build_run_spec(read_spec_file(path), "spec.json")


@pytest.mark.parametrize(
    ("workers", "servers", "copies", "refused"),
    [
        (2, 2, 2, ""),
        (2, 1, 2, "2 copies of each slice need as many servers; add --servers 2"),
        (2, None, 2, "add --servers 2"),
        (4, 2, 3, "add --servers 3"),
        (2, 0, 2, ""),
        ("2:8", 0, 2, ""),
        ("1:8", 0, 2, "as few as 1; write --workers 2:8, or add --servers 2"),
        (2, 0, 3, "as few as 2; write --workers 3:3, or add --servers 3"),
        (1, 0, None, ""),
    ],
)
def test_copies_of_a_slice_need_as_many_who_can_hold_them(
    workers: int | str, servers: int | None, copies: int | None, refused: str
) -> None:
    """Servers; without any, the workers that there are at least."""
    asked = {"strategy": "ps", "workers": workers, "servers": servers, "copies": copies}
    if not refused:
        assert build_run_spec(asked, "command line").copies == copies
        return
    with pytest.raises(UsageError) as caught:
        build_run_spec(asked, "command line")
    assert refused in caught.value.what
