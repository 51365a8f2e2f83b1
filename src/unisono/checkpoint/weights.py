# SPDX-License-Identifier: Apache-2.0
"""Weights as a file, and their hash: the number that two runs are compared by.

The hash covers every tensor's name, dtype, shape and bytes in name order, and nothing else, so a run, a state dict in
memory, a safetensors file and a `torch.save` file of the same weights all have the same one. Safetensors files are
hashed from their bytes without torch; pickled code in a `.pt` file is never run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from unisono.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 1 << 20
_DTYPES = {  # torch's names to safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
}  # fmt: skip


_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors words an error of the operating system


def _entry(name: str, dtype: str, shape: list[int]) -> bytes:
    return json.dumps([name, dtype, shape], separators=(",", ":")).encode() + b"\n"


def hash_state(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors of a state dict; entries that are not tensors do not count."""
    import torch

    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            continue
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        dtype = str(whole.dtype).removeprefix("torch.")
        total.update(_entry(name, _DTYPES.get(dtype, dtype), list(whole.shape)))
        if whole.numel():
            total.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that appears whole or not at all. Tied tensors are written once under each name.

    Raises OSError where it cannot be written, and RuntimeError for a dtype that such a file cannot hold.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        if str(value.dtype).removeprefix("torch.") not in _DTYPES:
            raise RuntimeError(f"{name} is {value.dtype}, which a safetensors file cannot hold")
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    scratch = path.with_name(path.name + ".tmp")
    try:
        save_file(plain, scratch)
        scratch.replace(path)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise RuntimeError(str(error)) from None
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    finally:
        scratch.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """The hash of a safetensors or `torch.save` file."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
            file.seek(0)
            # A safetensors file starts with eight bytes of length, which may look like anything, and a brace.
            if start[:2] in (b"PK", b"\x80\x02") and start[8:] != b"{":
                return _hash_torch_file(path)
            return _hash_safetensors(file, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _hash_safetensors(file: BinaryIO, path: Path) -> str:
    size = path.stat().st_size
    try:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        total = hashlib.sha256()
        for name in sorted(header):
            entry = header[name]
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= size - 8 - header_bytes:
                raise ValueError(f"tensor {name!r} lies outside the file")
            total.update(_entry(name, entry["dtype"], list(entry["shape"])))
            file.seek(8 + header_bytes + first)
            left = last - first
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                total.update(chunk)
                left -= len(chunk)
        return total.hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise UsageError(
            f"{path} is neither a safetensors nor a torch file of weights: {error}",
            do="give a run directory, a .safetensors file or a .pt file with a state dict",
        ) from None


def _hash_torch_file(path: Path) -> str:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way
        raise UsageError(
            f"{path} holds more than tensors, or is damaged; it was not loaded",
            cause=(str(error).splitlines() or [type(error).__name__])[0],
            do="save only model.state_dict()",
        ) from None
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]  # the usual {"model": ..., "optimizer": ...}
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(f"{path} holds no state dict", do="save model.state_dict()")
    return hash_state(state)
