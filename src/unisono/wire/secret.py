# SPDX-License-Identifier: Apache-2.0
"""The join secret: how two ends of a TLS connection prove to each other that both know it.

The server's certificate is made for the run and signed by nobody, so the proof covers the certificate that each end
sees: someone in the middle, with another certificate, can pass on no proof. 80 random bits, written for people.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets

_BYTES = 10
_GROUP = 4


def new_secret() -> str:
    """Sixteen letters and digits in groups of four: ``K7QF-2M9X-…``."""
    text = base64.b32encode(secrets.token_bytes(_BYTES)).decode()
    return "-".join(text[i : i + _GROUP] for i in range(0, len(text), _GROUP))


def tidy(secret: str) -> str:
    """As a person may have typed it: case, blanks and dashes do not matter."""
    return re.sub(r"[\s-]", "", secret).upper()


def new_nonce() -> str:
    return secrets.token_hex(16)


def proof(secret: str, role: str, certificate: bytes, client_nonce: str, server_nonce: str) -> str:
    """What only someone who knows the secret, on a connection with this certificate, can say."""
    seen = hashlib.sha256(certificate).hexdigest()
    text = "\n".join(("unisono join", role, seen, client_nonce, server_nonce))
    return hmac.new(tidy(secret).encode(), text.encode(), hashlib.sha256).hexdigest()


def same(a: str, b: str) -> bool:
    return hmac.compare_digest(a, b)
