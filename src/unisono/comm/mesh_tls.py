# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS 1.3 for the mesh: every worker shows the run's one certificate and accepts only that one.

TLS decides who is there and carries one fresh key in each direction. What follows is sealed under those keys by
`mesh_sealed`, straight out of and into the memory of tensors: TLS's own records have 16 KB, and a call and two copies
for each of them cost more than the encryption. `SecureSocket` behaves like a non-blocking socket. One thread at a time.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence

from unisono.comm.mesh_sealed import KEY_BYTES, Opener, Sealer
from unisono.wire.certificate import Certificate

_RECEIVE_BYTES = 1 << 14  # at once, while TLS speaks


class Tls:
    """Both directions under one certificate."""

    def __init__(self, certificate: Certificate) -> None:
        self._expected = certificate.der
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, certificate)
        self._answering = _context(ssl.PROTOCOL_TLS_SERVER, certificate)
        self._answering.num_tickets = 0  # nobody resumes

    def wrap(self, sock: socket.socket, calling: bool) -> SecureSocket:
        return SecureSocket(sock, self._calling if calling else self._answering, calling, self._expected)


def _context(protocol: ssl._SSLMethod, certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names a run, not a machine
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust this certificate, whoever signed it
    context.load_verify_locations(cadata=certificate.certificate)
    certificate.load_into(context)
    return context


class SecureSocket:
    """Whatever cannot go on now raises BlockingIOError, and the end of the connection another OSError."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, calling: bool, expected: bytes) -> None:
        self._sock, self._expected = sock, expected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()  # encrypted bytes
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not calling)
        self._shaken = False
        self._their_key = b""
        self._sealer: Sealer
        self._opener: Opener

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    @property
    def drained(self) -> bool:
        """Nothing is left here; more can only come from the socket."""
        return self._opener.drained

    @property
    def waiting_bytes(self) -> int:
        return self._opener.waiting_bytes

    def handshake(self) -> None:
        """Call again when there is something to read, until it returns."""
        while not self._shaken:
            self._shake_hands()
        while len(self._their_key) < KEY_BYTES:
            try:
                self._their_key += self._tls.read(KEY_BYTES - len(self._their_key))
            except ssl.SSLWantReadError:
                self._fill()
        self._opener = Opener(self._sock, self._their_key, self._incoming.read())
        self._their_key = bytes(KEY_BYTES)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            self._fill()
            return
        except ssl.SSLError:
            self._flush()  # tells the other side why
            raise
        # The chain was verified; this also refuses whatever that certificate might have signed.
        if self._tls.getpeercert(binary_form=True) != self._expected:
            raise ConnectionError("the other side showed a certificate that is not this run's")
        key = os.urandom(KEY_BYTES)
        self._tls.write(key)
        self._flush()
        self._sealer, self._shaken = Sealer(self._sock, key), True

    def sendmsg(self, views: Sequence[memoryview | bytes]) -> int:
        """How many bytes have left. After BlockingIOError, offer the same bytes again; others may follow them."""
        return self._sealer.send(views)

    def send(self, data: bytes) -> int:
        return self._sealer.send([data])

    def recv_into(self, room: memoryview) -> int:
        return self._opener.receive(room)

    def recv(self, size: int) -> bytes:
        room = memoryview(bytearray(size))
        return bytes(room[: self.recv_into(room)])

    def _fill(self) -> None:
        data = self._sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the other side is gone")
        self._incoming.write(data)

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._sock.send(data)  # fits the empty buffer of a new connection
