# SPDX-License-Identifier: Apache-2.0
"""The run's certificate at work: what is said in a handshake, and that nothing is said behind it."""

from __future__ import annotations

import contextlib
import ssl

from unisono.wire.certificate import make_certificate, unverified_client_context


def shake_hands() -> tuple[ssl.SSLObject, bytes]:
    """A client, and what the server still sent after the client's last word."""
    made = make_certificate()
    to_server, to_client, from_server = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
    client = unverified_client_context().wrap_bio(to_client, to_server)
    server = made.server_context().wrap_bio(to_server, from_server, server_side=True)
    for side in (client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    to_client.write(from_server.read())
    client.do_handshake()
    server.do_handshake()
    assert client.getpeercert(binary_form=True) == made.der
    return client, from_server.read()


def test_the_handshake_is_of_the_newest_kind() -> None:
    client, _ = shake_hands()
    assert client.version() == "TLSv1.3"


def test_nothing_comes_behind_a_handshake_that_a_client_would_have_to_read_while_it_sends() -> None:
    """Session tickets do by default. Nobody resumes a session here; see `Certificate.server_context`."""
    _, behind = shake_hands()
    assert behind == b""
