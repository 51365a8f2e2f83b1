# SPDX-License-Identifier: Apache-2.0
"""The first bytes of a safetensors file: eight of length, then JSON that says where each tensor lies.

Written by us so that a tensor's memory can follow it into a store without being copied, and read by us with suspicion:
`parse_header` raises ValueError for anything that is not exactly such a header. Torch is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.checkpoint.specs import RESERVED, TensorSpec, check_name, spec_from

_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000  # safetensors' own limit
_ALIGNMENT = 8


@dataclass(frozen=True)
class Extent:
    """A tensor in a file: what it is, and its first byte and the one behind its last, counted from the file's start."""

    spec: TensorSpec
    first: int
    last: int


def encode_header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, Extent]]:
    """The header, and where the tensors must follow it. Wide elements come first, so that all of them are aligned."""
    order = sorted(specs, key=lambda name: (-specs[name].item_bytes, name))
    entries: dict[str, object] = {RESERVED: {"format": "pt"}}
    offset, places = 0, {}
    for name in order:
        places[name] = (offset, offset := offset + specs[name].bytes)
        entries[name] = {"dtype": specs[name].dtype, "shape": list(specs[name].shape), "data_offsets": places[name]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = _LENGTH_BYTES + len(text)
    extents = {name: Extent(specs[name], begin + first, begin + last) for name, (first, last) in places.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, extents


def parse_header(data: memoryview) -> dict[str, Extent]:
    """Of a whole file. Raises ValueError unless the tensors fill it without a gap."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if len(data) < begin or length > _MOST_BYTES:
        raise ValueError("its header is longer than the file")
    try:
        entries = json.loads(bytes(data[_LENGTH_BYTES:begin]))
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    entries.pop(RESERVED, None)
    extents = {check_name(name): _extent(name, entry, begin) for name, entry in entries.items()}
    end = begin
    for extent in sorted(extents.values(), key=lambda extent: (extent.first, extent.last)):
        if extent.first != end:
            raise ValueError("its tensors overlap or leave a gap")
        end = extent.last
    if end != len(data):
        raise ValueError("its tensors do not fill it")
    return extents


def _extent(name: str, entry: object, begin: int) -> Extent:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(offsets, list) or [type(at) for at in offsets] != [int, int]:
        raise ValueError(f"its header does not say where {name!r} lies")
    spec = spec_from(entry.get("dtype"), entry.get("shape"))
    first, last = offsets
    if first < 0 or last - first != spec.bytes:
        raise ValueError(f"its header gives {name!r} the wrong number of bytes")
    return Extent(spec, begin + first, begin + last)
