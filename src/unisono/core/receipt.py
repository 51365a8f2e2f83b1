# SPDX-License-Identifier: Apache-2.0
"""The receipt of a run: a record of what went in and what came out that cannot be changed unseen.

A JSON file. Its first line holds the SHA-256 and the signature of everything behind that line, as it stands: a changed
byte shows before anything is parsed, and ``tail -n +2 receipt.json | sha256sum`` is enough to see it. Pure; what goes
in is gathered by `receipt_gathering`, and `control.replay` runs it again.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono.core.errors import ReceiptDamaged, UsageError
from unisono.core.signing import SigningKey, is_signed, key_id

FORMAT: Final = "unisono receipt"
VERSION = 1
_HEAD = re.compile(rb'\{"sha256":"([0-9a-f]{64})","signature":"([0-9a-f]{128}|)",\n')
_MOST_BYTES = 64 << 20
_WIDTH = 110  # characters of a line

Hexadecimal = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Code(_Part):
    """The script and what it imports from beside itself. `sha256` is over all names and hashes; empty: not known."""

    sha256: str
    files: dict[str, str]
    changed: list[str] = Field(default_factory=list)  # not the same at the end as at the start


class DataSeen(_Part):
    """`by`: what the digest is of. Probed samples are a few; a hash stands for all the data."""

    by: Literal["hash", "probed samples", "nothing"]
    digest: str
    samples: int | None


class Start(_Part):
    """Each time that the run was started: more than one if it was resumed."""

    time: str
    workers: int
    code: str  # Code.sha256 at that time


class Resume(_Part):
    step: int
    checkpoint: str
    differs: list[str]


class Change(_Part):
    """Generations count from 1 again after each start."""

    generation: int
    step: int
    members: list[int]
    because: str


class Saved(_Part):
    step: int
    sha256: str


class Losses(_Part):
    """The loss of step 1, of every so many steps, and of the last, as a hexadecimal float: exact, and comparable."""

    every: int = Field(ge=1)
    rows: list[tuple[int, str]]


class Outcome(_Part):
    weights_sha256: Hexadecimal
    steps: int = Field(ge=0)
    samples: int = 0
    skipped_steps: int = 0
    stopped_early: str = ""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    workers: int = 0
    seconds: float = 0.0


class Signer(_Part):
    algorithm: Literal["Ed25519"]
    key_id: str
    public_key: Hexadecimal


class Receipt(_Part):
    format: Literal["unisono receipt"]
    version: int
    name: str
    started: str
    ended: str
    versions: dict[str, str]
    code: Code
    data: DataSeen
    run: dict[str, Any]  # what was asked for, as in spec.json
    job: dict[str, Any]  # what the training made of it
    fingerprint: dict[str, Any]
    result: Outcome
    starts: list[Start]
    resumes: list[Resume]
    membership: list[Change]
    checkpoints: list[Saved]
    losses: Losses
    signed_by: Signer | None = None


@dataclass(frozen=True)
class Opened:
    """A receipt of which every byte is as it was written. `signer`: the public key, None if nobody has signed it."""

    receipt: Receipt
    sha256: str
    signer: bytes | None


def code_digest(files: dict[str, str]) -> str:
    """One hash for all of them; empty for none."""
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest() if files else ""


def seal(receipt: Receipt, key: SigningKey | None) -> bytes:
    """The file."""
    document = receipt.model_dump(mode="json")
    document["signed_by"] = None
    if key is not None:
        public = key.public.hex()
        document["signed_by"] = {"algorithm": "Ed25519", "key_id": key_id(key.public), "public_key": public}
    body = _text(document, 0).removeprefix("{\n").encode() + b"\n"
    signature = key.sign(body).hex() if key is not None else ""
    return f'{{"sha256":"{hashlib.sha256(body).hexdigest()}","signature":"{signature}",\n'.encode() + body


def _text(value: Any, depth: int) -> str:
    """JSON that a person can read: what fits into a line is one line."""
    line = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or not value or (depth and depth + len(line) <= _WIDTH):
        return line
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(name)}: {_text(item, depth + 1)}" for name, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(inner + _text(item, depth + 1) for item in value) + "\n" + " " * depth + "]"


def unseal(raw: bytes, what: str) -> Opened:
    """Raises ReceiptDamaged unless hash and signature hold. `what` names it in messages."""
    head = _HEAD.match(raw)
    if head is None:
        raise _damaged(what, "it does not begin with its hash and signature")
    body = raw[head.end() :]
    digest = hashlib.sha256(body).hexdigest()
    if digest != head[1].decode():
        raise _damaged(what, "its hash is not that of its contents")
    try:
        document = json.loads(b"{" + body)
    except (ValueError, RecursionError):
        raise _damaged(what, "it is no JSON") from None
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise ReceiptDamaged(
            f"{what} was written by a later version of Unisono", do=f"update Unisono (it has format {version})"
        )
    try:
        receipt = Receipt(**document)
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "it is no receipt"}
        raise _damaged(what, f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")) from None
    return Opened(receipt, digest, _signer(receipt, body, bytes.fromhex(head[2].decode()), what))


def _signer(receipt: Receipt, body: bytes, signature: bytes, what: str) -> bytes | None:
    signer = receipt.signed_by
    if signer is None and not signature:
        return None
    if signer is None or not signature:
        raise _damaged(what, "it is half signed")
    public = bytes.fromhex(signer.public_key)
    if signer.key_id != key_id(public) or not is_signed(body, signature, public):
        raise _damaged(what, f"it is not signed by key {signer.key_id[:40]}, as it claims")
    return public


def _damaged(what: str, why: str) -> ReceiptDamaged:
    return ReceiptDamaged(
        f"{what} is damaged: {why}",
        cause="a copy that broke off, or somebody who changed it",
        do="get it again from where the run was; what it says must not be believed",
    )


def read_receipt(path: Path) -> Opened:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the receipt {path}: {error.strerror}",
            do="give a receipt.json, a run's directory, or its name under runs/",
        ) from None
    if len(raw) > _MOST_BYTES:
        raise _damaged(str(path), "no receipt is that long")
    return unseal(raw, str(path))
