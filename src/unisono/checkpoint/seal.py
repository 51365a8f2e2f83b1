# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest: AES-256-GCM around whole chunks, and a signature under the manifest, with keys that can change.

A sealed object is magic, key id, random nonce, ciphertext, tag. The chunk's hash is authenticated with it, so that one
chunk cannot stand in for another. The first key seals, all of them open: put a new one in front and old checkpoints
stay readable. Keys are never printed; messages name them by their ids. Called by `parts`, `reading` and `manifest`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from unisono.core.errors import CheckpointDamaged, UsageError, WrongKey

VARIABLE = "UNISONO_CHECKPOINT_KEY"
CIPHER = "AES-256-GCM"
_KEY_BYTES, _ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 8, 12, 16
_MAGIC = b"UNISEAL1"
HEAD_BYTES = len(_MAGIC) + _ID_BYTES + _NONCE_BYTES
OVERHEAD = HEAD_BYTES + _TAG_BYTES
_SLACK = 16  # the library asks for room for a block more than it writes
_HOW = "a key is 32 random bytes as 64 hexadecimal digits (openssl rand -hex 32) or as base64, one on each line"

Buffer = bytes | bytearray | memoryview


class Seal:
    """A ring of keys."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != _KEY_BYTES for key in keys):
            raise UsageError("a checkpoint key has the wrong length", do=_HOW)
        self._keys = {_key_id(key): key for key in keys}
        self.key_id = _key_id(keys[0])

    def __repr__(self) -> str:
        return f"Seal({', '.join(self._keys)})"

    def close(self, buffers: Sequence[Buffer], digest: str) -> list[Buffer]:
        """The sealed object of a chunk with that hash, as buffers that follow one another."""
        head = _MAGIC + bytes.fromhex(self.key_id) + os.urandom(_NONCE_BYTES)
        cipher = Cipher(algorithms.AES(self._keys[self.key_id]), modes.GCM(head[-_NONCE_BYTES:])).encryptor()
        cipher.authenticate_additional_data(head + digest.encode())
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        # Never a buffer that is used again: a store may still be sending it when it has given up waiting. Left
        # uninitialised, its pages are touched first by the cipher, which works without the interpreter's lock.
        room = np.empty(size + _SLACK, dtype=np.uint8).data
        done = 0
        for buffer in buffers:
            done += cipher.update_into(buffer, room[done:])
        return [head, room[:done], cipher.finalize() + cipher.tag]

    def open(self, data: Buffer, digest: str, what: str) -> memoryview:
        """The chunk inside. WrongKey: sealed with another key. CheckpointDamaged: not as it was sealed."""
        sealed = memoryview(data)
        head = bytes(sealed[:HEAD_BYTES])
        if len(sealed) < OVERHEAD or not head.startswith(_MAGIC):
            raise CheckpointDamaged(f"{what} is damaged: it is no sealed object")
        key = self._key(head[len(_MAGIC) : -_NONCE_BYTES].hex(), what)
        mode = modes.GCM(head[-_NONCE_BYTES:], bytes(sealed[-_TAG_BYTES:]))
        cipher = Cipher(algorithms.AES(key), mode).decryptor()
        cipher.authenticate_additional_data(head + digest.encode())
        body = sealed[HEAD_BYTES:-_TAG_BYTES]
        room = np.empty(len(body) + _SLACK, dtype=np.uint8).data
        done = cipher.update_into(body, room)
        try:
            cipher.finalize()
        except InvalidTag:
            raise CheckpointDamaged(f"{what} is damaged: it was changed after it had been sealed") from None
        return room[:done].toreadonly()

    def is_current(self, head: bytes) -> bool:
        """Whether an object that begins so was sealed with the key that seals now."""
        return head.startswith(_MAGIC + bytes.fromhex(self.key_id))

    def sign(self, body: bytes) -> str:
        return _signature(self._keys[self.key_id], body)

    def check(self, body: bytes, key_id: str, signature: str, what: str) -> None:
        if not hmac.compare_digest(_signature(self._key(key_id, what), body).encode(), signature.encode()):
            raise CheckpointDamaged(f"{what} is damaged: it was changed by somebody without the key")

    def _key(self, key_id: str, what: str) -> bytes:
        if key_id not in self._keys:
            raise WrongKey(
                f"{what} is sealed with key {key_id}, and the keys given are {', '.join(self._keys)}",
                do="add that key to the key file, behind the one for new checkpoints",
            )
        return self._keys[key_id]


def no_key(what: str) -> WrongKey:
    return WrongKey(f"{what} is sealed and no key was given", do=f"give a key file, or set {VARIABLE}")


def find_seal(key_file: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Seal | None:
    """The keys of a key file, else of the environment, else None: no encryption."""
    if key_file is not None:
        try:
            text = Path(key_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"cannot read the key file {key_file}: {why}", do=_HOW) from None
        return Seal(_parse(text.splitlines(), f"the key file {key_file}"))
    text = environ.get(VARIABLE, "")
    return Seal(_parse(text.replace(",", "\n").splitlines(), VARIABLE)) if text.strip() else None


def _parse(lines: Sequence[str], source: str) -> list[bytes]:
    """Empty lines and those with a # are skipped. No part of a key may get into a message."""
    keys = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key = _decode(text)
            if key is None:
                raise UsageError(f"line {number} of {source} is no checkpoint key", do=_HOW)
            keys.append(key)
    if not keys:
        raise UsageError(f"{source} holds no key", do=_HOW)
    return keys


def _decode(text: str) -> bytes | None:
    try:
        key = bytes.fromhex(text) if len(text) == 2 * _KEY_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    return key if len(key) == _KEY_BYTES else None


def _key_id(key: bytes) -> str:
    return hashlib.sha256(b"unisono checkpoint key id\0" + key).digest()[:_ID_BYTES].hex()


def _signature(key: bytes, body: bytes) -> str:
    own = hmac.digest(key, b"unisono manifest", "sha256")  # never one key for two purposes
    return hmac.digest(own, body, "sha256").hex()
