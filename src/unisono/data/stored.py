# SPDX-License-Identifier: Apache-2.0
"""A shard as it lies in storage: compressed or not, with its checksums, and the way back to the raw file.

`pack` makes the stored file and its entry; `unpack` is the way back, never longer than the index says, so that a small
file cannot fill the memory; `load_shard` fetches, verifies and opens one in memory. Whoever keeps shards on disk calls
`unpack` itself. zstandard is imported when something is compressed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from unisono.core.errors import SetupError
from unisono.data.index import Index, ShardEntry, checksum, wrong_checksum
from unisono.data.place import Place
from unisono.data.schema import damaged
from unisono.data.shard import Shard

_PIECE_BYTES = 4 << 20
Piece = bytes | memoryview


def zstandard() -> Any:
    try:
        import zstandard as module
    except ImportError as error:
        raise SetupError(
            "the shards are compressed, and zstandard cannot be imported", cause=str(error), do="pip install zstandard"
        ) from None
    return module


def pack(pieces: Iterable[Piece], name: str, samples: int, level: int | None) -> tuple[list[Piece], ShardEntry]:
    """The file to store, in pieces, and its entry; `level` None is no compression. `name` is without ``.zst``."""
    whole = list(pieces)
    raw_bytes, raw_checksum = sum(map(len, whole)), checksum(*whole)
    if level is not None:
        compressor = zstandard().ZstdCompressor(level=level, write_checksum=False).compressobj(size=raw_bytes)
        whole = [compressor.compress(piece) for piece in whole] + [compressor.flush()]
        name += ".zst"
    entry = ShardEntry(
        file=name,
        samples=samples,
        bytes=sum(map(len, whole)),
        raw_bytes=raw_bytes,
        checksum=raw_checksum,
        stored_checksum=raw_checksum if level is None else checksum(*whole),
    )
    return whole, entry


def unpack(stored: Piece, entry: ShardEntry, compression: str | None, name: str) -> Iterator[Piece]:
    """The raw file in pieces. It ends without an exception only when length and checksum were right."""
    if len(stored) != entry.bytes:
        raise damaged(name, f"it has {len(stored):,} bytes and should have {entry.bytes:,}", _AGAIN)
    state, left = hashlib.sha256(), entry.raw_bytes
    for piece in [memoryview(stored)] if compression is None else _decompressed(stored, name):
        left -= len(piece)
        if left < 0:
            break
        state.update(piece)
        yield piece
    if left:
        relation = "more" if left < 0 else f"{left:,} fewer"
        raise damaged(name, f"it holds {relation} bytes than the {entry.raw_bytes:,} that it should hold", _AGAIN)
    if (got := f"sha256:{state.hexdigest()}") != entry.checksum:
        raise wrong_checksum(name, got, entry.checksum)


_AGAIN = "fetch it again; if it stays so, copy it again from where it is whole"


def _decompressed(stored: Piece, name: str) -> Iterator[bytes]:
    module = zstandard()
    try:
        with module.ZstdDecompressor().stream_reader(stored, read_across_frames=False) as reader:
            while piece := reader.read(_PIECE_BYTES):
                yield piece
    except module.ZstdError as error:
        raise damaged(name, f"it cannot be decompressed: {error}", _AGAIN) from None


def load_shard(place: Place, index: Index, number: int, decode: bool = True) -> Shard:
    """One shard in memory, fetched and verified to the last bit."""
    entry = index.shards[number]
    name = place.name(entry.file)
    raw = b"".join(unpack(place.read(entry.file), entry, index.compression, name))
    shard = Shard(raw, name, decode)
    index.fits(shard, number)
    return shard
