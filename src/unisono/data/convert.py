# SPDX-License-Identifier: Apache-2.0
"""A whole source into shards: what ``unisono data write`` calls.

The columns are settled first, from the source, the first samples and what was asked for. Then one process writes all,
or several write one run of the samples each (`convert_parts`), and the index puts their shards in order. Samples
that cannot be used stop the work, or are left out and counted, as asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.core.errors import BadSample, EmptyData, SchemaMismatch, SetupError
from unisono.core.ranges import split as split_evenly
from unisono.data.filling import ShardFiller
from unisono.data.index import Index, ShardEntry
from unisono.data.place import Place
from unisono.data.schema import Column, infer_columns
from unisono.data.sources import Sample, Source, open_source
from unisono.data.writer import DEFAULT_LEVEL, DEFAULT_SHARD_BYTES, FIRST_SAMPLES, check_settings, clear, write_index

_AT_A_TIME = 64  # samples that are read together


@dataclass(frozen=True)
class Conversion:
    """What is to be written where. `columns` overrule what the source knows and what the first samples show."""

    source: str
    dest: str
    kind: str | None = None  # of reader, by the names of the files if not given
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reader
    columns: Mapping[str, str] = field(default_factory=dict)
    shard_bytes: int = DEFAULT_SHARD_BYTES
    compression: str | None = "zstd"
    level: int = DEFAULT_LEVEL
    processes: int = 1
    overwrite: bool = False
    skip_bad: bool = False


@dataclass
class Progress:
    """How far one or all of the processes are."""

    samples: int = 0
    raw_bytes: int = 0
    skipped: int = 0
    last_skipped: str = ""


Report = Callable[[Progress, int], None]  # what is done, and how many samples there are in all


def write_shards(conversion: Conversion, report: Report = lambda _done, _all: None) -> tuple[Index, Progress]:
    """Read the whole source and write it as shards; the index, and what was done."""
    check_settings(conversion.shard_bytes, conversion.compression, conversion.level)
    if conversion.processes < 1:
        raise SetupError(f"{conversion.processes} processes cannot write anything", do="give 1 or more")
    source, place = open_source(conversion.source, conversion.kind, conversion.options), Place(conversion.dest)
    columns = _columns(source, conversion)
    clear(place, conversion.overwrite)
    parts = [part for part in split_evenly(len(source), conversion.processes) if len(part)]
    if len(parts) == 1:
        done = Progress()
        entries = write_part(source, conversion, columns, parts[0], done, lambda: report(done, len(source)))
    else:
        from unisono.data.convert_parts import write_parts

        entries, done = write_parts(conversion, columns, parts, lambda done: report(done, len(source)))
    if not entries:
        raise EmptyData(f"there is nothing to write to {conversion.dest}", cause=f"all {done.skipped} samples were bad")
    return write_index(place, columns, entries, conversion.compression), done


def _columns(source: Source, conversion: Conversion) -> tuple[Column, ...]:
    """From the first samples that can be read, the source and the order; the later of the three wins."""
    first: list[Sample] = []
    for index in range(len(source)):
        try:
            first += source.raw([index])
        except BadSample:
            if not conversion.skip_bad:
                raise
        if len(first) == FIRST_SAMPLES:
            break
    if not first:
        raise EmptyData(f"no sample of {conversion.source} can be read", cause=f"all {len(source)} are bad")
    return infer_columns(first, {**source.columns, **conversion.columns})


def write_part(
    source: Source,
    conversion: Conversion,
    columns: Sequence[Column],
    part: range,
    done: Progress,
    tick: Callable[[], None],
    prefix: str = "shard-",
) -> list[ShardEntry]:
    """The shards of one run of the samples; `done` is kept up to date, `tick` says when."""
    level = conversion.level if conversion.compression else None
    filler = ShardFiller(Place(conversion.dest), columns, conversion.shard_bytes, level, prefix)
    try:
        for index, sample in _samples(source, part, conversion.skip_bad, done):
            filler.number = index
            try:
                filler.add(sample)
                done.samples, done.raw_bytes = done.samples + 1, filler.raw_bytes
            except SchemaMismatch as error:
                if not conversion.skip_bad:
                    error.where = source.where(index)
                    raise
                _skip(done, f"{source.where(index)}: {error.what}: {error.cause}")
            tick()
        return filler.finish()
    finally:
        filler.abandon()


def _samples(source: Source, part: range, skip_bad: bool, done: Progress) -> Iterator[tuple[int, Sample]]:
    """Many at a time; where one of them is bad, that lot one by one."""
    for first in range(part.start, part.stop, _AT_A_TIME):
        lot = range(first, min(first + _AT_A_TIME, part.stop))
        try:
            yield from zip(lot, source.raw(lot), strict=True)
            continue
        except BadSample:
            if not skip_bad:
                raise
        for index in lot:
            try:
                (sample,) = source.raw([index])
            except BadSample as error:
                _skip(done, f"{error.where}: {error.cause}")
            else:
                yield index, sample


def _skip(done: Progress, why: str) -> None:
    done.skipped += 1
    done.last_skipped = why
