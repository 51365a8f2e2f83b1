# SPDX-License-Identifier: Apache-2.0
"""The error tree: codes, exit codes, the trip between processes, and what a tired person reads."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core import errors
from unisono.core.errors import EXIT_CODES, InternalError, PeerLost, UnisonoError, WorkerLost, from_dict, suggest


def tree(root: type[UnisonoError]) -> list[type[UnisonoError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in tree(child))]


KINDS = [kind for kind in tree(UnisonoError) if kind.__module__ == errors.__name__]


def test_no_two_kinds_of_error_share_a_code() -> None:
    own = Counter(kind.code for kind in KINDS if kind is not InternalError)  # that one is the root under its own name
    assert [code for code, count in own.items() if count > 1] == []
    assert all(re.fullmatch(r"UNI-\d{4}", code) for code in own)


def test_every_exit_code_is_explained_and_every_explanation_is_needed() -> None:
    assert {kind.exit_code for kind in KINDS} | {0} == set(EXIT_CODES)


texts = st.text('ab"\\\n\r\u2028é🎵 ', max_size=8)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(what=texts, where=texts, cause=texts, do=texts)
def test_an_error_survives_the_trip_to_another_process(
    kind: type[UnisonoError], what: str, where: str, cause: str, do: str
) -> None:
    sent = kind(what, where=where, cause=cause, do=do)
    received = from_dict(json.loads(json.dumps(sent.as_dict())))
    assert received.as_dict() == sent.as_dict()
    assert str(received) == str(sent)
    assert kind is InternalError or type(received) is kind


def test_a_code_of_another_version_becomes_an_internal_error_with_its_text() -> None:
    error = from_dict({"code": "UNI-8888", "what": "a thing of the future", "do": "update"})
    assert isinstance(error, InternalError)
    assert (error.what, error.do, error.exit_code) == ("a thing of the future", "update", 70)


def test_even_an_empty_dictionary_is_an_error_with_words() -> None:
    assert str(from_dict({})) == "UNI-9001  unknown failure"


def test_a_full_error_reads_like_this() -> None:
    error = PeerLost("the connection broke", where="step 5", cause="it was cut\nby someone", do="look\n\nagain")
    assert str(error) == (
        "UNI-2002  the connection broke\n"
        "  where   step 5\n"
        "  cause   it was cut\n"
        "          by someone\n"
        "  do      look\n"
        "          \n"
        "          again"
    )


def test_what_is_not_known_takes_no_line() -> None:
    assert str(WorkerLost("gone", do="wait")) == "UNI-2001  gone\n  do      wait"


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("wokers", "did you mean 'workers'?"),
        ("workers", "did you mean 'workers'?"),
        ("sed", "did you mean 'seed'?"),
        ("banana", ""),
        ("", ""),
    ],
)
def test_a_misspelt_word_gets_a_suggestion_when_one_is_close(word: str, answer: str) -> None:
    assert suggest(word, ["workers", "seed", "threads"]) == answer
