# SPDX-License-Identifier: Apache-2.0
"""Messages between processes: each arrives as it was sent, and what nobody understands is ignored, not fatal."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.wire import messages as m

texts = st.text('a"\\\n é🎵{}', max_size=6)
values = st.one_of(texts, st.integers(-5, 5), st.floats(-1, 1), st.none(), st.booleans())
tables = st.dictionaries(texts, values, max_size=3)
STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: texts,
    bool: st.booleans(),
    int | None: st.none() | st.integers(0, 9),
    dict[str, str]: st.dictionaries(texts, texts, max_size=3),
    dict[str, Any]: tables,
    dict[str, Any] | None: st.none() | tables,
    list[int]: st.lists(st.integers(0, 9), max_size=3),
    list[str]: st.lists(texts, max_size=3),
    list[list[int]]: st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=3),
    list[dict[str, Any]]: st.lists(tables, max_size=2),
}


def messages_of(kind: type[m.Message]) -> st.SearchStrategy[m.Message]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{item.name: STRATEGIES[hints[item.name]] for item in dataclasses.fields(kind)})


KINDS = [kind for name, kind in sorted(m.KINDS.items())]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    text = m.encode(message)
    assert "\n" not in text, "one line each"
    assert m.decode(text) == message
    assert m.from_dict(json.loads(text)) == message


def test_every_kind_has_a_name_of_its_own() -> None:
    classes = [kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.Message)]
    assert len({kind.kind for kind in classes}) == len(classes)
    assert {kind for kind in classes if kind is not m.Message} == set(KINDS)


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "7", '"ready"', "{}", '{"message":"no such kind"}', '{"message":"formed"}', b"\xff\xfe"],
)
def test_what_is_not_a_message_is_none(text: str | bytes) -> None:
    assert m.decode(text) is None


def test_a_field_of_a_newer_version_is_ignored_and_one_of_an_older_is_filled_in() -> None:
    assert m.decode('{"message":"formed","worker":1,"generation":2,"mood":"good"}') == m.Formed(worker=1, generation=2)
    assert m.decode('{"message":"status","worker":1}') == m.Status(worker=1)


@given(
    st.dictionaries(texts | st.sampled_from(["message", "worker"]), values | st.sampled_from(list(m.KINDS)), max_size=4)
)
def test_no_object_whatsoever_breaks_the_reader(data: dict[str, Any]) -> None:
    found = m.decode(json.dumps(data))
    assert found is None or isinstance(found, m.Message)


def test_messages_for_and_from_workers_name_their_worker() -> None:
    for kind in (*m.TO_WORKERS, *m.FROM_WORKERS):
        assert "worker" in {item.name for item in dataclasses.fields(kind)}


def test_a_command_can_name_the_host_it_is_about() -> None:
    command = m.Command(what="leave", host="b")
    assert m.decode(m.encode(command)) == command
    assert m.Command(what="leave").host == ""
