# SPDX-License-Identifier: Apache-2.0
"""The user's own signing key (Ed25519): made when it is first needed, in a file that only they can read.

It says who wrote a receipt, and nothing else uses it. The file is PEM as OpenSSL knows it; UNISONO_SIGNING_KEY may
name another. `cryptography` is imported when something is to be signed or checked. Called by `receipt_gathering` and
by the commands around receipts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.core.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VARIABLE = "UNISONO_SIGNING_KEY"
ALGORITHM = "Ed25519"
_FILE = Path("unisono") / "signing.key"
_MOST_BYTES = 10_000  # of a file that is said to hold a key
_HOW = "give the 64 hexadecimal digits that unisono receipt key prints on the signer's machine, or a file with them"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class SigningKey:
    """`public`: the 32 bytes by which everybody else knows it."""

    private: Ed25519PrivateKey
    public: bytes

    def __repr__(self) -> str:
        return f"SigningKey({key_id(self.public)})"

    def sign(self, body: bytes) -> bytes:
        return self.private.sign(body)


def key_id(public: bytes) -> str:
    """Short, for people; what counts is the whole key."""
    return hashlib.sha256(public).hexdigest()[:16]


def is_signed(body: bytes, signature: bytes, public: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, body)
    except (InvalidSignature, ValueError):
        return False
    return True


def key_path(environ: Mapping[str, str] = os.environ) -> Path:
    named = environ.get(VARIABLE, "")
    if named:
        return Path(named)
    configured = Path(environ.get("XDG_CONFIG_HOME", ""))  # one that is relative does not count
    return (configured if configured.is_absolute() else Path.home() / ".config") / _FILE


def own_key(environ: Mapping[str, str] = os.environ) -> SigningKey | None:
    """The user's key if there is one. OSError and ValueError: there is something, and it cannot be used."""
    try:
        return _read(key_path(environ))
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # the last: this user has no home
        return None


def make_key(environ: Mapping[str, str] = os.environ) -> SigningKey:
    """Make the user's key, unless somebody else has just done so. OSError: there is no place for it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        path = key_path(environ)
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _place(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return _read(path)


def _place(scratch: Path, path: Path) -> None:
    """Whole or not at all, and of two that come at once the first: never over a key that is there."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS or path.exists():
            raise
        scratch.replace(path)


def _read(path: Path) -> SigningKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = _start_of(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # no key; one with a password; one of another world
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} holds no {ALGORITHM} key without a password (openssl genpkey -algorithm ed25519)")
    return SigningKey(key, key.public_key().public_bytes_raw())


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def read_public(text: str) -> bytes:
    """A public key as a user gives it: its hexadecimal digits, or a file that holds them or is PEM."""
    found = _public_in(text.encode())
    if found is None:
        try:
            found = _public_in(_start_of(Path(text)))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no path"
            raise UsageError(f"{text} is no public key, and no file that could be read: {why}", do=_HOW) from None
    if found is None:
        raise UsageError(f"{text} holds no public key", do=_HOW)
    return found


def _public_in(data: bytes) -> bytes | None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    digits = data.strip().lower()
    if re.fullmatch(rb"[0-9a-f]{64}", digits):
        return bytes.fromhex(digits.decode())
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None
