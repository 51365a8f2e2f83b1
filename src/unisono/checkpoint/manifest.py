# SPDX-License-Identifier: Apache-2.0
"""The manifest: what a checkpoint consists of, as a value and as bytes, and the keys of all objects in a store.

A checkpoint exists if and only if its manifest does. Decoding trusts nothing: whatever a manifest may say, the result
is either consistent in itself or CheckpointDamaged. Reads and writes no store; `commit` and `listing` do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.checkpoint.seal import CIPHER, OVERHEAD, Seal
from unisono.checkpoint.specs import TensorSpec, check_name, spec_from
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.core.errors import CheckpointDamaged, CheckpointNewer

FORMAT, VERSION = "unisono checkpoint", 1
STEPS, CHUNKS, PARTS = "steps/", "chunks/", "parts/"
MOST_STEPS = 10**12
_HASH = re.compile(r"[0-9a-f]{64}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_STEP_KEY = re.compile(re.escape(STEPS) + r"(\d{12})\.json")


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of a tensor: they lie in that chunk, from its byte `at` on."""

    chunk: str
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class StoredTensor:
    spec: TensorSpec
    pieces: tuple[Piece, ...]  # from element 0 to the last one, without a gap


@dataclass(frozen=True)
class StoredChunk:
    hash: str  # SHA-256 of the safetensors file
    bytes: int  # of that file
    sealed: bool = False

    @property
    def key(self) -> str:
        return f"{CHUNKS}{self.hash[:2]}/{self.hash}.{'sealed' if self.sealed else 'safetensors'}"

    @property
    def stored_bytes(self) -> int:
        """Of the object in the store."""
        return self.bytes + (OVERHEAD if self.sealed else 0)


@dataclass(frozen=True)
class Manifest:
    step: int
    created_s: float
    tensors: dict[str, StoredTensor]
    chunks: dict[str, StoredChunk]
    facts: dict[str, Any] = field(default_factory=dict)
    key_id: str = ""  # of the key that it is signed with
    hash: str = ""  # of the whole; empty before it is encoded

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.chunks.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Those numbers in `facts` by which the best checkpoint is chosen."""
        found = self.facts.get("metrics")
        found = found if isinstance(found, dict) else {}
        return {name: value for name, value in found.items() if type(value) in (int, float)}


def step_key(step: int) -> str:
    return f"{STEPS}{step:012d}.json"


def step_of(key: str) -> int | None:
    """The step of a manifest's key; None for any other object."""
    found = _STEP_KEY.fullmatch(key)
    return int(found[1]) if found else None


def encode_manifest(manifest: Manifest, seal: Seal | None = None) -> bytes:
    """With a seal it is signed, not encrypted: names, shapes and numbers stay readable."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "created": manifest.created_s,
        "facts": manifest.facts,
        "seal": {"cipher": CIPHER, "key": seal.key_id} if seal else None,
        "tensors": {
            name: {
                "dtype": tensor.spec.dtype,
                "shape": tensor.spec.shape,
                "pieces": [[piece.chunk, piece.begin, piece.end, piece.at] for piece in tensor.pieces],
            }
            for name, tensor in manifest.tensors.items()
        },
        "chunks": {
            chunk.hash: {"bytes": chunk.bytes, "stored": chunk.stored_bytes, "sealed": chunk.sealed}
            for chunk in manifest.chunks.values()
        },
    }
    return stamp(document, seal)


def decode_manifest(raw: bytes, what: str, seal: Seal | None = None) -> Manifest:
    """`what` names it in messages. Without a seal the signature of a sealed checkpoint is not checked."""
    document, digest, body, mac = unstamp(raw, what)
    check_version(document, FORMAT, VERSION, what)
    try:
        manifest = _manifest(document, digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "something that every manifest has is not there"
        raise CheckpointDamaged(f"{what} is damaged: it has {reason}") from None
    if bool(manifest.key_id) != bool(mac):
        raise CheckpointDamaged(f"{what} is damaged: it is half signed")
    if manifest.key_id and seal is not None:
        seal.check(body, manifest.key_id, mac, what)
    return manifest


def check_version(document: Mapping[str, Any], form: str, version: int, what: str) -> None:
    if document.get("format") != form:
        raise CheckpointDamaged(f"{what} is damaged: it is no {form}")
    found = document.get("version")
    if type(found) is int and found > version:
        raise CheckpointNewer(
            f"{what} was written by a later version of Unisono", do=f"update Unisono (it has format {found})"
        )
    if type(found) is not int or found != version:
        raise CheckpointDamaged(f"{what} is damaged: it has no version that ever was")


def _manifest(document: Mapping[str, Any], digest: str) -> Manifest:
    _require(type(document["step"]) is int and 0 <= document["step"] < MOST_STEPS, "no step")
    created_s = document["created"]
    _require(type(created_s) in (int, float) and 0 <= created_s < 1e11, "no date")
    _require(isinstance(document["facts"], dict), "no facts")
    chunks = {name: stored_chunk(name, entry) for name, entry in document["chunks"].items()}
    tensors = {check_name(name): _tensor(name, entry, chunks) for name, entry in document["tensors"].items()}
    used = {piece.chunk for tensor in tensors.values() for piece in tensor.pieces}
    _require(used == set(chunks), "chunks that no tensor needs")
    seal = document["seal"]
    if seal is not None:
        _require(seal["cipher"] == CIPHER, f"a cipher that nobody knows, {str(seal['cipher'])[:40]!r}")
        _require(isinstance(seal["key"], str) and _KEY_ID.fullmatch(seal["key"]) is not None, "no id of its key")
    key_id = seal["key"] if seal else ""
    return Manifest(document["step"], float(created_s), tensors, chunks, document["facts"], key_id, digest)


def stored_chunk(name: str, entry: Mapping[str, Any]) -> StoredChunk:
    """From JSON. Raises ValueError, KeyError or TypeError. The name becomes part of a path, so it must be a hash."""
    _require(isinstance(name, str) and _HASH.fullmatch(name) is not None, "a chunk without a hash")
    _require(type(entry["bytes"]) is int and entry["bytes"] > 0, f"no size of chunk {name}")
    _require(type(entry["sealed"]) is bool, f"not whether chunk {name} is sealed")
    chunk = StoredChunk(name, entry["bytes"], entry["sealed"])
    _require(entry["stored"] == chunk.stored_bytes, f"two sizes of chunk {name}")
    return chunk


def _tensor(name: str, entry: Mapping[str, Any], chunks: Mapping[str, StoredChunk]) -> StoredTensor:
    spec = spec_from(entry["dtype"], entry["shape"])
    pieces = []
    _require(isinstance(entry["pieces"], list), f"no pieces of {name!r}")
    done = 0
    for row in entry["pieces"]:
        _require(isinstance(row, list) and len(row) == 4, f"a wrong piece of {name!r}")
        _require(all(type(number) is int for number in row[1:]), f"a wrong piece of {name!r}")
        piece = Piece(*row)
        _require(piece.chunk in chunks, f"a piece of {name!r} in a chunk that it does not list")
        fits = 0 < piece.at <= chunks[piece.chunk].bytes - (piece.end - piece.begin) * spec.item_bytes
        _require(piece.begin == done and piece.end >= done and fits, f"a gap in {name!r}")
        done = piece.end
        pieces.append(piece)
    _require(done == spec.count and len(pieces) > 0, f"a gap in {name!r}")
    _require(len(pieces) == 1 or all(piece.end > piece.begin for piece in pieces), f"an empty piece of {name!r}")
    return StoredTensor(spec, tuple(pieces))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
