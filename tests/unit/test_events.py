# SPDX-License-Identifier: Apache-2.0
"""The stream of events: every kind goes to a line and back; damaged, foreign and unfinished lines do no harm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core import events
from unisono.core.events import KINDS, Event, Notice, decode, encode, read

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text('ab"\\\n\r\u2028é🎵{} ', max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {  # by the annotation of a field
    "str": texts,
    "int": st.integers(),
    "int | None": st.none() | st.integers(),
    "float": numbers,
    "float | None": st.none() | numbers,
    "bool": st.booleans(),
    "list[int]": st.lists(st.integers()),
    "list[float]": st.lists(numbers, max_size=3),
    "list[str]": st.lists(st.text(max_size=5), max_size=3),
    "list[list[int]]": st.lists(st.lists(st.integers())),
    "dict[str, str]": st.dictionaries(texts, texts, max_size=3),
    "dict[str, int]": st.dictionaries(texts, st.integers(), max_size=3),
    "dict[str, float | None]": st.dictionaries(texts, st.none() | numbers, max_size=3),
    "dict[str, float]": st.dictionaries(texts, numbers, max_size=3),
    "dict[str, dict[str, float]]": st.dictionaries(texts, st.dictionaries(texts, numbers, max_size=3), max_size=3),
    "dict[str, Any]": st.dictionaries(texts, plain, max_size=3),
    "dict[str, Any] | None": st.none() | st.dictionaries(texts, plain, max_size=3),
}


def of_kind(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{field.name: VALUES[str(field.type)] for field in dataclasses.fields(kind)})


any_event = st.sampled_from(sorted(KINDS)).flatmap(lambda name: of_kind(KINDS[name]))


def test_every_class_of_event_has_a_kind_of_its_own() -> None:
    classes = {value for value in vars(events).values() if isinstance(value, type) and issubclass(value, Event)}
    assert set(KINDS.values()) == classes - {Event}
    assert all(kind.kind == name != "" for name, kind in KINDS.items())


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=20)
@given(data=st.data())
def test_an_event_goes_to_one_line_and_back(kind: str, data: st.DataObject) -> None:
    event = data.draw(of_kind(KINDS[kind]))
    line = encode(event)
    assert "\n" not in line
    assert decode(line) == decode(line.encode()) == event


def test_numbers_that_json_does_not_have_become_null_for_any_reader() -> None:
    event = events.Evaluated(
        step=1, epoch=1, metrics={"loss": float("nan"), "top": float("inf"), "low": 0.5}, seconds=1.0
    )

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert json.loads(encode(event), parse_constant=refuse)["metrics"] == {"loss": None, "top": None, "low": 0.5}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "not json",
        "[]",
        "3",
        "null",
        '"kind"',
        "{}",
        '{"kind":"notice"}',
        '{"kind":["notice"],"code":"a","text":"b"}',
        '{"kind":"from_the_future","text":"b"}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_event_is_ignored(line: str | bytes) -> None:
    assert decode(line) is None


def test_fields_of_a_newer_version_are_ignored() -> None:
    line = json.dumps({"kind": "notice", "time_s": 1.5, "worker": 2, "code": "a", "text": "b", "colour": "red"})
    assert decode(line) == Notice(time_s=1.5, worker=2, code="a", text="b")


def test_an_event_knows_when_it_was_made_and_is_the_supervisors_by_default() -> None:
    first, second = Notice(code="a", text="b"), Notice(code="a", text="b")
    assert 1.7e9 < first.time_s <= second.time_s
    assert first.worker is None


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@given(sent=st.lists(any_event, min_size=1, max_size=4), data=st.data())
def test_a_file_cut_off_anywhere_still_gives_every_whole_line(
    scratch: Path, sent: list[Event], data: st.DataObject
) -> None:
    lines = [encode(event).encode() + b"\n" for event in sent]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    path = scratch / "events.jsonl"
    path.write_bytes(whole[:cut])
    ends = [sum(map(len, lines[: i + 1])) - 1 for i in range(len(lines))]  # the newline itself may be missing
    assert list(read(path)) == [event for event, end in zip(sent, ends, strict=True) if end <= cut]


def test_foreign_lines_between_events_are_left_out(tmp_path: Path) -> None:
    one, two = Notice(code="a", text="1"), Notice(code="a", text="2")
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join([encode(one), '{"kind":"from_the_future"}', "", "garbage", encode(two), ""]))
    assert list(read(path)) == [one, two]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert list(read(tmp_path / "events.jsonl")) == []
