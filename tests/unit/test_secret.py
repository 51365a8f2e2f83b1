# SPDX-License-Identifier: Apache-2.0
"""The join secret: easy to type, hard to guess, and proved without being said, for one certificate and one meeting."""

from __future__ import annotations

import re
from typing import Any

import pytest

from unisono.wire import secret

GIVEN = {
    "secret": "K7QF-2M9X-ABCD-WXYZ",
    "role": "host",
    "certificate": b"certificate",
    "client_nonce": "11",
    "server_nonce": "22",
}


def proof(**changed: Any) -> str:
    return secret.proof(**(GIVEN | changed))


def test_a_secret_is_sixteen_letters_and_digits_in_groups() -> None:
    found = {secret.new_secret() for _ in range(50)}
    assert len(found) == 50
    assert all(re.fullmatch(r"[A-Z2-7]{4}(-[A-Z2-7]{4}){3}", each) for each in found)


@pytest.mark.parametrize(
    "typed", ["k7qf-2m9x-abcd-wxyz", "K7QF2M9XABCDWXYZ", " K7QF 2M9X\tABCD-WXYZ\n", "k7-qf2m9xabcdwxy-z"]
)
def test_case_blanks_and_dashes_do_not_matter(typed: str) -> None:
    assert proof(secret=typed) == proof()


@pytest.mark.parametrize(
    "changed",
    [
        {"secret": "K7QF-2M9X-ABCD-WXYA"},
        {"role": "coordinator"},  # nobody can send a proof back to whom it came from
        {"certificate": b"of someone in the middle"},
        {"client_nonce": "12"},  # of another meeting
        {"server_nonce": "21"},
        {"client_nonce": "22", "server_nonce": "11"},
        {"client_nonce": "1", "server_nonce": "122"},
    ],
)
def test_a_proof_holds_for_one_secret_role_certificate_and_meeting(changed: dict[str, Any]) -> None:
    assert not secret.same(proof(**changed), proof())


def test_the_same_proof_is_the_same() -> None:
    assert secret.same(proof(), proof())


def test_a_proof_does_not_contain_the_secret() -> None:
    assert secret.tidy(GIVEN["secret"]) not in proof().upper()
    assert re.fullmatch(r"[0-9a-f]{64}", proof())


def test_every_meeting_has_its_own_number() -> None:
    assert len({secret.new_nonce() for _ in range(50)}) == 50
