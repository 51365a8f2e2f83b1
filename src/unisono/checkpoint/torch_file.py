# SPDX-License-Identifier: Apache-2.0
"""A `torch.save` file of a state dict that is larger than the memory.

Torch writes the file with holes where the values belong; they are put there one after another, and the
check sums of the archive are corrected at the end, so that the file is like any other. Called by `export`.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from unisono.checkpoint.dtypes import TORCH_NAME
from unisono.checkpoint.specs import TensorSpec
from unisono.core.errors import InternalError

_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of the extra field
_CENTRAL_HEADER = struct.Struct("<28xHHH12x")  # the same, and that of the comment
_CENTRAL_BYTES, _LOCAL_BYTES, _CHECK_SUM_AT = 46, 30, 16
_DESCRIPTOR_MAGIC = b"PK\x07\x08"


def write_torch_file(path: Path, specs: Mapping[str, TensorSpec], values: Iterable[Iterable[memoryview]]) -> None:
    """`values` gives, for each tensor of `specs` in its order, its bytes in pieces. Raises OSError."""
    _write_with_holes(path, specs)
    records = _records(path, specs)
    with path.open("r+b") as file:
        sums = [_fill(file, record, pieces) for record, pieces in zip(records, values, strict=True)]
        _correct(file, path, {r.header_offset: check_sum for r, check_sum in zip(records, sums, strict=True)})
        file.flush()
        os.fsync(file.fileno())


def _write_with_holes(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    import torch
    from torch.serialization import skip_data

    # Memory that nobody touches costs nothing.
    hollow = {
        name: torch.empty(spec.shape, dtype=getattr(torch, TORCH_NAME[spec.dtype])) for name, spec in specs.items()
    }
    with skip_data(), path.open("wb") as file:
        torch.save(hollow, file)


def _records(path: Path, specs: Mapping[str, TensorSpec]) -> list[zipfile.ZipInfo]:
    """The holes, in the order of the tensors."""
    with zipfile.ZipFile(path) as archive:
        found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    records = [found.get(f"data/{number}") for number in range(len(specs))]
    sizes = [None if record is None else record.file_size for record in records]
    if sizes != [spec.bytes for spec in specs.values()]:
        raise InternalError("torch.save lays its files out in a way that this version of Unisono does not know")
    return [record for record in records if record is not None]


def _fill(file: BinaryIO, record: zipfile.ZipInfo, pieces: Iterable[memoryview]) -> int:
    """Put the values of one tensor into its hole. Returns their check sum."""
    file.seek(record.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_BYTES))
    file.seek(record.header_offset + _LOCAL_BYTES + name_bytes + extra_bytes)
    check_sum = written = 0
    for piece in pieces:
        check_sum = zlib.crc32(piece, check_sum)
        written += file.write(piece)
    if written != record.file_size:
        raise InternalError(f"a tensor of {record.file_size} bytes was exported with {written}")
    after = file.tell()
    if file.read(4) == _DESCRIPTOR_MAGIC and written:
        file.seek(after + 4)
        file.write(struct.pack("<I", check_sum))
    return check_sum


def _correct(file: BinaryIO, path: Path, sums: Mapping[int, int]) -> None:
    """Write the check sums into the archive's directory. `sums`: by where a record begins."""
    with zipfile.ZipFile(path) as archive:
        records, at = archive.infolist(), archive.start_dir
    for record in records:  # in the order of the directory, each followed by its name, extra field and comment
        if record.header_offset in sums:
            file.seek(at + _CHECK_SUM_AT)
            file.write(struct.pack("<I", sums[record.header_offset]))
        file.seek(at)
        at += _CENTRAL_BYTES + sum(_CENTRAL_HEADER.unpack(file.read(_CENTRAL_BYTES)))
