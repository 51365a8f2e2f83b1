# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS 1.3 for the mesh: every worker shows the run's one certificate and accepts only that one.

`SecureSocket` behaves like a non-blocking socket, but encrypts many records for one system call; the ssl module's own
sockets make three calls for each 16 KB, which costs more than the encryption. One thread at a time.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, cast

from unisono.wire.certificate import Certificate

_CHUNK_BYTES = 1 << 18  # encrypted, or received, at once


class Tls:
    """Both directions under one certificate."""

    def __init__(self, certificate: Certificate) -> None:
        self._expected = certificate.der
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, certificate)
        self._answering = _context(ssl.PROTOCOL_TLS_SERVER, certificate)
        self._answering.num_tickets = 0  # nobody resumes, and unread tickets would turn a close into a reset

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
    """Whatever cannot go on now raises BlockingIOError, and the end of the connection ConnectionError."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, calling: bool, expected: bytes) -> None:
        self._sock, self._expected = sock, expected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()  # encrypted bytes
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not calling)
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))
        self._unsent = memoryview(b"")
        self._accepted = 0  # bytes of the caller's that `_unsent` stands for
        self.drained = True  # no whole record is left here; more can only come from the socket

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def handshake(self) -> None:
        """Call again when there is something to read, until it returns."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                self._flush()  # tells the other side why
                raise
        self._flush()
        # The chain was verified; this also refuses whatever that certificate might have signed.
        if self._tls.getpeercert(binary_form=True) != self._expected:
            raise ConnectionError("the other side showed a certificate that is not this run's")

    def sendmsg(self, views: Sequence[memoryview | bytes]) -> int:
        """How many bytes have left. After BlockingIOError, offer the same bytes again; others may follow them."""
        if not self._accepted:
            chunk = views[0][:_CHUNK_BYTES]
            if len(chunk) < _CHUNK_BYTES and len(views) > 1:
                chunk = _first(views)
            while self._accepted < len(chunk):
                self._accepted += self._tls.write(chunk[self._accepted :])
        self._flush()
        accepted, self._accepted = self._accepted, 0
        return accepted

    def send(self, data: bytes) -> int:
        return self.sendmsg([data])

    def recv_into(self, room: memoryview) -> int:
        if taken := self._decrypt(room):
            return taken
        self._fill()
        if taken := self._decrypt(room):
            return taken
        raise BlockingIOError

    def recv(self, size: int) -> bytes:
        room = memoryview(bytearray(size))
        return bytes(room[: self.recv_into(room)])

    def _decrypt(self, room: memoryview) -> int:
        taken = 0
        self.drained = False
        try:
            while taken < len(room):
                part: Any = room[taken:]
                taken += cast(int, self._tls.read(len(part), part))  # with a buffer it returns a count
        except ssl.SSLWantReadError:
            self.drained = True
        return taken

    def _fill(self) -> None:
        count = self._sock.recv_into(self._buffer)
        if not count:
            raise ConnectionError("the other side is gone")
        self._incoming.write(self._buffer[:count])

    def _flush(self) -> None:
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
                if not self._unsent:
                    return
            self._unsent = self._unsent[self._sock.send(self._unsent) :]


def _first(views: Sequence[memoryview | bytes]) -> bytes:
    """A chunk's worth of bytes, so that a header does not become a record of its own."""
    parts, length = [], 0
    for view in views:
        parts.append(view[: _CHUNK_BYTES - length])
        length += len(parts[-1])
        if length == _CHUNK_BYTES:
            break
    return b"".join(parts)
