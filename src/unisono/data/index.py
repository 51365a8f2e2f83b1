# SPDX-License-Identifier: Apache-2.0
"""The index of a set of shards: what the samples consist of, which files hold them, and their checksums.

`index.json` is written last, in one moment, so that a set of shards is complete or is not there. Its own checksum, over
everything else in it, stands for all the data: it is what a receipt of a run names. Reads and checks the index; where
it lies is the business of `place`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from unisono.core.errors import DataDamaged, DataMissing
from unisono.data.place import Place
from unisono.data.schema import Column, check_names, damaged, explain
from unisono.data.shard import Shard

INDEX_NAME = "index.json"
SHARD_NAME = re.compile(r"shard-\d{1,12}(-\d{1,12})?\.uds(\.zst)?")
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_INDEX = 1 << 30
_MOST = 1 << 48  # of samples or bytes in one shard


def checksum(*pieces: Any) -> str:
    """SHA-256: sound against intent as well as accident, in every Python, and with the instructions that processors
    have for it since about 2017 twice as fast as BLAKE2; ``sha256sum`` on the file gives the same."""
    state = hashlib.sha256()
    for piece in pieces:
        state.update(piece)
    return f"sha256:{state.hexdigest()}"


class ShardEntry(BaseModel):
    """One shard: `bytes` and `stored_checksum` of the file as it lies there, `raw_bytes` and `checksum` of what is in
    it once it is decompressed. Without compression the two are the same."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    file: str
    samples: int
    bytes: int
    raw_bytes: int
    checksum: str
    stored_checksum: str

    @model_validator(mode="after")
    def _makes_sense(self) -> ShardEntry:
        if not SHARD_NAME.fullmatch(self.file):
            raise ValueError(f"{self.file!r} is not the name of a shard")
        if not all(1 <= count <= _MOST for count in (self.samples, self.bytes, self.raw_bytes)):
            raise ValueError(f"a shard has 1 to {_MOST:,} samples and bytes")
        if not all(map(_CHECKSUM.fullmatch, (self.checksum, self.stored_checksum))):
            raise ValueError("a checksum is sha256: and 64 hexadecimal digits")
        return self


class Index(BaseModel):
    """A set of shards: ``read_index("s3://bucket/train").samples``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["unisono-shards"] = "unisono-shards"
    version: Literal[1] = 1
    compression: Literal["zstd"] | None
    columns: tuple[Column, ...]
    samples: int
    shards: tuple[ShardEntry, ...]

    @field_validator("columns")
    @classmethod
    def _names_differ(cls, columns: tuple[Column, ...]) -> tuple[Column, ...]:
        try:
            check_names(columns)
        except Exception as error:
            raise ValueError(str(error)) from None
        return columns

    @model_validator(mode="after")
    def _adds_up(self) -> Index:
        if sum(entry.samples for entry in self.shards) != self.samples:
            raise ValueError("the samples of the shards do not add up")
        names = [entry.file for entry in self.shards]
        if not names or len(set(names)) < len(names):
            raise ValueError("there are no shards, or one stands twice")
        if any(name.endswith(".zst") != (self.compression is not None) for name in names):
            raise ValueError("the names of the shards do not agree with the compression")
        return self

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The id of the first sample of every shard, and behind the last one the number of all."""
        return tuple(itertools.accumulate((entry.samples for entry in self.shards), initial=0))

    def locate(self, sample: int) -> tuple[int, int]:
        """Shard and row of a sample."""
        shard = bisect.bisect_right(self.starts, sample) - 1
        return shard, sample - self.starts[shard]

    @functools.cached_property
    def hash(self) -> str:
        """One checksum that stands for all the data."""
        return checksum(_canonical(self.model_dump(mode="json")))

    def to_bytes(self) -> bytes:
        """The index file: one line for each shard, so that a person can read it."""
        content = self.model_dump(mode="json")
        shards = ",\n".join("  " + json.dumps(entry) for entry in content.pop("shards"))
        columns = ",\n".join("  " + json.dumps(column) for column in content.pop("columns"))
        head = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in content.items())
        text = f'{{{head}"columns": [\n{columns}\n],\n"shards": [\n{shards}\n],\n"checksum": "{self.hash}"}}\n'
        return text.encode()

    @classmethod
    def parse(cls, data: bytes, name: str) -> Index:
        """From an index file; `name` is what messages call it."""
        if len(data) > _LONGEST_INDEX:
            raise damaged(name, f"it has {len(data):,} bytes: no index is as long")
        try:
            signed = _Signed.model_validate_json(data)
        except ValidationError as error:
            raise damaged(
                name, explain(error), "write the data again, or copy it again from where it is whole"
            ) from None
        index = cls.model_construct(**{key: getattr(signed, key) for key in cls.model_fields})
        if index.hash != signed.checksum:
            raise damaged(
                name, f"its checksum is {index.hash} and should be {signed.checksum}", "copy or write it again"
            )
        return index

    def check(self, shard: Shard, number: int) -> None:
        """That an open shard is the one of this index, to the last bit."""
        got, expected = checksum(shard.raw), self.shards[number].checksum
        if got != expected:
            raise wrong_checksum(shard.name, got, expected)
        self.fits(shard, number)

    def fits(self, shard: Shard, number: int) -> None:
        """That a shard whose checksum is known to be right holds what the index says."""
        if shard.count != self.shards[number].samples:
            expected = self.shards[number].samples
            raise damaged(shard.name, f"it has {shard.count:,} samples and should have {expected:,}")
        shard.check_columns(self.columns)


class _Signed(Index):
    checksum: str


def wrong_checksum(name: str, got: str, expected: str) -> DataDamaged:
    return damaged(name, f"its checksum is {got}\nand should be   {expected}", "copy it again from where it is whole")


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def read_index(where: str | Place) -> Index:
    """The index of the shards at a URL or in a folder."""
    place = where if isinstance(where, Place) else Place(where)
    try:
        return Index.parse(place.read(INDEX_NAME), place.name(INDEX_NAME))
    except DataMissing:
        raise DataMissing(
            f"there are no shards at {place.url}",
            cause=f"it has no {INDEX_NAME}: the address is wrong, or the writer was stopped before it had finished",
            do="correct the address; or write the data (again): unisono data write SOURCE DEST",
        ) from None
