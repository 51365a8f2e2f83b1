# SPDX-License-Identifier: Apache-2.0
"""``unisono data``: write shards from what people have, check a set of shards, show what is in one.

Thin: reading and writing is `unisono.data`. Hooked into the command line by `app`; each command imports what it needs
when it is called.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unisono.data.convert import Progress
    from unisono.data.index import Index

data_app = typer.Typer(help="Write, check and show sets of shards.", no_args_is_help=True, rich_markup_mode=None)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_PLAIN_EVERY_S, _PLAIN_SLOWEST_S = 2.0, 30.0


@data_app.command()
def write(
    source: Annotated[str, typer.Argument(help="Files, a pattern or a folder; any fsspec URL.")],
    dest: Annotated[str, typer.Argument(help="A folder or URL for the shards.")],
    kind: Annotated[
        str | None, typer.Option(help="folder, jsonl, csv, parquet, tar or tokens (default: by the names).")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="What a column holds: label=int32, x=float32[3,?].", metavar="NAME=KIND")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the reader: length=1024.", metavar="NAME=VALUE")
    ] = None,
    shard_bytes: Annotated[str, typer.Option(help="Size of a shard, uncompressed.", metavar="BYTES")] = "64Mi",
    compression: Annotated[str, typer.Option(help="zstd or none.")] = "zstd",
    level: Annotated[int, typer.Option(help="Of zstd: 1 is fast, 22 is small.")] = 3,
    processes: Annotated[int, typer.Option(help="How many write at once.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished set of shards.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad samples out and count them.")] = False,
) -> None:
    """Write SOURCE as a set of shards to DEST.

    The index is written last: when this is killed, start it again.
    """
    from unisono.data.convert import Conversion, write_shards

    conversion = Conversion(
        source=source,
        dest=dest,
        kind=kind,
        options={name: _value(text) for name, text in _pairs("--option", option)},
        columns=dict(_pairs("--column", column)),
        shard_bytes=_bytes(shard_bytes),
        compression=None if compression == "none" else compression,
        level=level,
        processes=processes,
        overwrite=overwrite,
        skip_bad=skip_bad,
    )
    meter = _Meter()
    try:
        index, done = write_shards(conversion, meter.show)
    finally:
        meter.close()
    if done.skipped:
        print(f"skipped  {_many(done.skipped, 'bad sample')}, the last: {done.last_skipped}")
    stored = sum(entry.bytes for entry in index.shards)
    print(f"written  {_count(index)}, {_size(stored)}, to {dest}")
    print(f"hash     {index.hash}")


@data_app.command()
def check(url: Annotated[str, typer.Argument(help="A folder or URL with shards.")]) -> None:
    """Read every shard at URL and verify its checksum, its layout and its columns. Exit code 11 when one is bad."""
    from unisono.core.errors import DataDamaged, DataError
    from unisono.data.convert import Progress
    from unisono.data.index import read_index
    from unisono.data.place import Place
    from unisono.data.stored import load_shard

    place, done, faults = Place(url), Progress(), []
    index = read_index(place)
    meter = _Meter("checked")
    for number, entry in enumerate(index.shards):
        try:
            load_shard(place, index, number)
        except DataError as error:
            faults.append(error)
            print(error, file=sys.stderr)
        done.samples, done.raw_bytes = done.samples + entry.samples, done.raw_bytes + entry.raw_bytes
        meter.show(done, index.samples)
    meter.close()
    if faults:
        raise DataDamaged(
            f"{len(faults)} of {_many(len(index.shards), 'shard')} at {url} cannot be used",
            cause="\n".join(error.what for error in faults[:4]),
            do="copy those again from where they are whole, or write the data again",
        )
    print(f"good     {_count(index)}, every checksum is right")
    print(f"hash     {index.hash}")


@data_app.command()
def show(
    url: Annotated[str, typer.Argument(help="A folder or URL with shards.")],
    sample: Annotated[int, typer.Option(help="Which sample to show.", metavar="N")] = 0,
) -> None:
    """Print what the shards at URL hold, and one sample."""
    from unisono.core.errors import UsageError
    from unisono.data.index import read_index
    from unisono.data.place import Place
    from unisono.data.stored import load_shard

    place = Place(url)
    index = read_index(place)
    if not 0 <= sample < index.samples:
        raise UsageError(f"there is no sample {sample}", do=f"they are numbered 0 to {index.samples - 1}")
    stored, raw = sum(entry.bytes for entry in index.shards), sum(entry.raw_bytes for entry in index.shards)
    packed = f", {_size(raw)} uncompressed" if index.compression else ""
    print(f"holds    {_count(index)}")
    print(f"size     {_size(stored)}{packed}")
    print(f"hash     {index.hash}")
    shard, row = index.locate(sample)
    values = load_shard(place, index, shard, decode=False).sample(row)
    width, kinds = max(len(column.name) for column in index.columns), max(len(str(column)) for column in index.columns)
    print(f"columns  and sample {sample}, row {row} of {index.shards[shard].file}")
    for column in index.columns:
        print(f"  {column.name:<{width}}  {column!s:<{kinds}}  {_brief(values[column.name])}")


def _pairs(option: str, texts: list[str] | None) -> list[tuple[str, str]]:
    from unisono.core.errors import UsageError

    pairs = [text.partition("=") for text in texts or ()]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise UsageError(f"{option} {name}{sign}{value} is not a name, = and a value")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _value(text: str) -> Any:
    """Numbers, true, false, lists and so on as JSON has them; anything else is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bytes(text: str) -> int:
    from unisono.core.errors import UsageError

    number = text.rstrip("BKMGbkmgi")
    unit = text[len(number) :].lower().removesuffix("b")
    if not number.isdecimal() or unit not in _UNITS:
        raise UsageError(f"--shard-bytes {text} is not a size", do="such as 67108864, 64Mi or 64MB")
    return int(number) * _UNITS[unit]


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _count(index: Index) -> str:
    return f"{_many(index.samples, 'sample')} in {_many(len(index.shards), 'shard')}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _brief(value: Any) -> str:
    from unisono.data.schema import show as describe_value

    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, dict | list):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 60 else text[:60] + " …"
    return describe_value(value)


class _Meter:
    """How far long work is, on stderr: a bar on a terminal, elsewhere a line at widening intervals."""

    def __init__(self, verb: str = "written") -> None:
        self._verb, self._bar, self._task = verb, None, None
        self._every_s, self._begun_s = _PLAIN_EVERY_S, time.monotonic()
        self._next_s = self._begun_s + _PLAIN_EVERY_S
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(verb)
            self._bar.start()

    def show(self, done: Progress, total: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s and self._bar is None:
            return
        text = f"{self._verb} {done.samples:,} of {total:,} samples, {_size(done.raw_bytes)}"
        text += f", {_size(done.raw_bytes / max(now_s - self._begun_s, 1e-9))}/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=done.samples + done.skipped, total=total)
        else:
            self._next_s, self._every_s = now_s + self._every_s, min(self._every_s * 1.3, _PLAIN_SLOWEST_S)
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
