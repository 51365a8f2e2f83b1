# SPDX-License-Identifier: Apache-2.0
"""JSON documents that carry their own hash: manifests and parts.

The file begins with ``{"hash":"..."`` (and, where it is sealed, ``"mac":"..."``); the hash is over the rest as it
stands, so every changed byte shows before anything is parsed. `check_plain` says what may be in such a document.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from unisono.checkpoint.seal import Seal
from unisono.core.errors import CheckpointDamaged, Unstorable

_START = re.compile(rb'\{"hash":"([0-9a-f]{64})",(?:"mac":"([0-9a-f]{64})",)?')
_DEEPEST = 60


def stamp(document: dict[str, Any], seal: Seal | None = None) -> bytes:
    """The document must not be empty, nor have the keys `hash` or `mac`."""
    body = json.dumps(document, separators=(",", ":")).encode()
    mac = f'"mac":"{seal.sign(body)}",' if seal else ""
    return f'{{"hash":"{hashlib.sha256(body).hexdigest()}",{mac}'.encode() + body[1:]


def unstamp(raw: bytes, what: str) -> tuple[dict[str, Any], str, bytes, str]:
    """The document, its hash, the bytes that were hashed, and their signature, empty if there is none."""
    start = _START.match(raw)
    if start is None:
        raise CheckpointDamaged(f"{what} is damaged: it does not begin with its hash")
    body = b"{" + raw[start.end() :]
    digest = hashlib.sha256(body).hexdigest()
    if digest != start[1].decode():
        raise CheckpointDamaged(f"{what} is damaged: its hash is not that of its contents")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise CheckpointDamaged(f"{what} is damaged: it is no JSON") from None
    return document, digest, body, (start[2] or b"").decode()


def check_plain(value: object, where: str, depth: int = 0) -> None:
    """Raises Unstorable unless JSON gives back what it is given (a tuple comes back as a list)."""
    problem = ""
    if depth > _DEEPEST:
        problem = f"is nested more than {_DEEPEST} deep"
    elif isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                problem = f"has the key {key!r}, which is no text"
                break
            check_plain(entry, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            check_plain(entry, f"{where}[{index}]", depth + 1)
    elif isinstance(value, int) and abs(value) >= 1 << 4096:  # Python itself refuses to read very long numbers
        problem = "is a number of more than 4,096 bits"
    elif value is not None and not isinstance(value, str | int | float | bool):
        problem = f"is a {type(value).__name__}"
    if problem:
        raise Unstorable(
            f"{where} {problem}, which a checkpoint cannot hold",
            do="use numbers, texts, lists and dictionaries with text keys; put arrays into tensors",
        )
