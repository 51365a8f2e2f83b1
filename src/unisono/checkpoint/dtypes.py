# SPDX-License-Identifier: Apache-2.0
"""The element types that a checkpoint can hold: safetensors' names, torch's names, and the bytes of one element.

A table and nothing else; torch is not loaded. Whatever is not in it is refused by name when a checkpoint is saved.
"""

from __future__ import annotations

_TABLE = (  # safetensors' name, torch's name, bytes of one element
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
    ("F8_E8M0", "float8_e8m0fnu", 1),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U64", "uint64", 8),
    ("U32", "uint32", 4),
    ("U16", "uint16", 2),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
    ("C64", "complex64", 8),
)

SAFETENSORS_NAME = {torch_name: name for name, torch_name, _ in _TABLE}
TORCH_NAME = {name: torch_name for name, torch_name, _ in _TABLE}
ITEM_BYTES = {name: item_bytes for name, _, item_bytes in _TABLE}
