# SPDX-License-Identifier: Apache-2.0
"""Addresses and hellos of the mesh survive the journey, and what is neither is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.mesh_address import HELLO_BYTES, Address, Hello

words = st.text(st.characters(exclude_characters=";", exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, 2**63 - 1)


@given(words, st.text(max_size=40), st.sampled_from(["", "10.0.0.7", "fe80::1"]), st.integers(1, 65535))
def test_an_address_reads_as_it_was_written(host: str, path: str, ip: str, port: int) -> None:
    address = Address(host, path, ip, port if ip else 0)
    assert Address.parse(address.encode()) == address


def test_an_address_is_one_readable_line() -> None:
    assert Address("a", "/tmp/x/3.m", "10.0.0.7", 4711).encode() == "a;/tmp/x/3.m;10.0.0.7:4711"
    assert Address("a", "/tmp/x/3.m").encode() == "a;/tmp/x/3.m;"


@pytest.mark.parametrize(
    "text", ["", "a", "a;b", "a;b;c", "a;b;:1", "a;b;1.2.3.4:", "a;b;1.2.3.4:http", "a;b;1.2.3.4:²"]
)
def test_what_is_no_address_is_refused_with_the_form_it_should_have(text: str) -> None:
    with pytest.raises(ValueError, match="host;path;ip:port"):
        Address.parse(text)


def test_a_host_id_with_a_semicolon_is_refused() -> None:
    with pytest.raises(ValueError, match="semicolon"):
        Address("a;b", "/tmp/3.m")


@given(numbers, numbers, numbers)
def test_a_hello_reads_as_it_was_said(generation: int, worker: int, to: int) -> None:
    hello = Hello(generation, worker, to)
    assert len(hello.encode()) == HELLO_BYTES
    assert Hello.parse(hello.encode()) == hello


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_rubbish_is_no_hello(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a hello"):
        Hello.parse(data)
