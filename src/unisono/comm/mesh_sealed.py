# SPDX-License-Identifier: Apache-2.0
"""Bytes on a connection, sealed: nobody reads them, and none is changed, left out, repeated or put elsewhere unnoticed.

A record is its length and AES-128-GCM of up to 2 MB, with its number as nonce; each direction has a key of its own,
which `mesh_tls` has brought there by TLS. After 256 GB a key is replaced by one derived from it, long before so
much was encrypted under it that anything could be learnt. One pass over the bytes on each side: out of the caller's
memory into what is sent, and out of what was received into the caller's memory.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 16
_RECORD_BYTES = 1 << 21  # at most: each costs a few calls on either side, in caches that its bytes have emptied
_SMALL_BYTES = 1 << 12  # what is smaller shares a record with its neighbours
_AHEAD_BYTES = 1 << 16  # received at once, at least: what follows a short record is often there already
_WAKE_BYTES = 1 << 17  # of a long record, or its end, have to be there before we are woken
_KEY_LASTS_BYTES = 1 << 38
_LENGTH = struct.Struct("!I")
_TAG_BYTES = 16
_OVERHEAD_BYTES = _LENGTH.size + _TAG_BYTES


def _room(size: int) -> memoryview:
    """Memory that is there once it is used: a connection that carries short messages only does not need most of it."""
    return np.empty(size, np.uint8).data


class _Keys:
    """Of one direction: the cipher, and a nonce that never comes again under it."""

    def __init__(self, key: bytes) -> None:
        self._key, self.cipher = key, AESGCM(key)
        self._records = self._bytes = 0

    def nonce(self, length: int) -> bytes:
        """For the next record, of `length` bytes. Both sides count alike, so both change the key at the same one."""
        if self._bytes + length > _KEY_LASTS_BYTES:
            self._key = hmac.digest(self._key, b"unisono: the next key", hashlib.sha256)[:KEY_BYTES]
            self.cipher, self._records, self._bytes = AESGCM(self._key), 0, 0
        self._records += 1
        self._bytes += length
        return self._records.to_bytes(12, "big")


class Sealer:
    """The sending side."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self._sock, self._keys = sock, _Keys(key)
        self._sealed = _room(2 * _RECORD_BYTES)
        self._unsent = self._sealed[:0]  # the part of `_sealed` that has to leave
        self._accepted = 0  # bytes of the caller's that `_unsent` stands for

    def send(self, views: Sequence[memoryview | bytes]) -> int:
        """How many bytes have left. After BlockingIOError, offer the same bytes again; others may follow them."""
        if not self._accepted:
            self._seal(views)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        accepted, self._accepted = self._accepted, 0
        return accepted

    def _seal(self, views: Sequence[memoryview | bytes]) -> None:
        """About as much as one record may have, in records that begin and end with the large views.

        A large view is not cut for the sake of what is before it: its rest would be a record of a few bytes.
        """
        small: list[memoryview | bytes] = []
        room, end = _RECORD_BYTES, 0
        for view in views:
            if room <= 0 or (end and len(view) > room):
                break
            part = view[:_RECORD_BYTES]
            room -= len(part)
            if len(part) < _SMALL_BYTES:
                small.append(part)
            else:
                end = self._add(part, self._add(b"".join(small), end))
                small = []
        end = self._add(b"".join(small), end)
        self._unsent, self._accepted = self._sealed[:end], _RECORD_BYTES - room

    def _add(self, data: memoryview | bytes, start: int) -> int:
        """A record behind the others; where it ends."""
        if not len(data):
            return start
        body = start + _LENGTH.size
        end = body + len(data) + _TAG_BYTES
        _LENGTH.pack_into(self._sealed, start, len(data))
        nonce = self._keys.nonce(len(data))
        self._keys.cipher.encrypt_into(nonce, data, None, self._sealed[body:end])
        return end


class Opener:
    """The receiving side. `received`: what has come already."""

    def __init__(self, sock: socket.socket, key: bytes, received: bytes = b"") -> None:
        self._sock, self._keys = sock, _Keys(key)
        size = max(_RECORD_BYTES + _OVERHEAD_BYTES, len(received)) + _AHEAD_BYTES
        self._buffer = _room(size)
        self._buffer[: len(received)] = received
        self._start, self._stop = 0, len(received)  # of what was received and not opened
        self._open = memoryview(b"")  # of a record that did not fit where it belongs
        self._wake_at = 1  # bytes

    @property
    def drained(self) -> bool:
        """No whole record is left here."""
        return not self._open and self._whole() is None

    @property
    def waiting_bytes(self) -> int:
        """What has come and was not opened: most of the time, of a record that is not whole yet."""
        return self._stop - self._start

    def receive(self, room: memoryview) -> int:
        """Fill `room` with what has come. Raises BlockingIOError when nothing has."""
        while not (taken := self._take(room)):
            self._fill()
        return taken

    def _take(self, room: memoryview) -> int:
        taken = 0
        while taken < len(room):
            if self._open:
                count = min(len(self._open), len(room) - taken)
                room[taken : taken + count] = self._open[:count]
                self._open = self._open[count:]
            elif (length := self._whole()) is None:
                break
            elif length <= len(room) - taken:
                count = self._unseal(length, room[taken : taken + length])
            elif taken:  # its place may be another, which the caller finds out from what it has now
                break
            else:
                self._open, count = memoryview(bytearray(length)), 0
                self._unseal(length, self._open)
            taken += count
        return taken

    def _whole(self) -> int | None:
        """The length of the next record's data, if all of it is here."""
        have = self._stop - self._start
        if have < _LENGTH.size:
            return None
        length = self._length()
        return length if have >= length + _OVERHEAD_BYTES else None

    def _length(self) -> int:
        length = int(_LENGTH.unpack_from(self._buffer, self._start)[0])
        if not 0 < length <= _RECORD_BYTES:
            raise ConnectionError("the other side does not keep to the protocol")
        return length

    def _wake(self, at: int) -> None:
        """Over a slow network a long record comes in many small pieces, and none but the last is of any use."""
        if at != self._wake_at:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)
            self._wake_at = at

    def _unseal(self, length: int, room: memoryview) -> int:
        self._wake(1)  # whoever has what he wants may stop reading before he would have to wait
        body = self._start + _LENGTH.size
        self._start = body + length + _TAG_BYTES
        nonce = self._keys.nonce(length)
        try:
            return int(self._keys.cipher.decrypt_into(nonce, self._buffer[body : self._start], None, room))
        except InvalidTag:
            raise ConnectionError("what came was changed on its way, or was not meant for us") from None

    def _fill(self) -> None:
        """The rest of the record under way and how long the next one is, or more if that is little."""
        have = self._stop - self._start
        if self._start:
            self._buffer[:have] = bytes(self._buffer[self._start : self._stop])
            self._start, self._stop = 0, have
        whole = self._length() + _OVERHEAD_BYTES + _LENGTH.size if have >= _LENGTH.size else 0
        end = max(whole, _AHEAD_BYTES)
        try:
            count = self._sock.recv_into(self._buffer[have:end])
        except BlockingIOError:
            self._wake(min(_WAKE_BYTES, max(1, whole - _LENGTH.size - have)))
            raise
        if not count:
            raise ConnectionError("the other side is gone")
        self._stop += count
