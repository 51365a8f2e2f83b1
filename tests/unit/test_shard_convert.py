# SPDX-License-Identifier: Apache-2.0
"""A whole source into shards, by one process or several; the commands ``unisono data write``, ``check``, ``show``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_files import png
from typer.testing import CliRunner

from unisono.cli.data import _bytes, data_app
from unisono.core.errors import BadSample, DataDamaged, DataMissing, SchemaMismatch, SetupError, UsageError, WorkerLost
from unisono.data.convert import Conversion, Progress, write_shards
from unisono.data.index import read_index
from unisono.data.place import Place
from unisono.data.stored import load_shard


def lines(folder: Path, count: int, **odd: str) -> str:
    """A file of JSON lines, of which some are replaced: ``_17="not json"``."""
    rows = [json.dumps({"x": i, "text": f"line {i}"}) for i in range(count)]
    for number, row in odd.items():
        rows[int(number[1:])] = row
    path = folder / "a.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def column(url: str, name: str) -> list[Any]:
    index = read_index(url)
    shards = (load_shard(Place(url), index, number) for number in range(len(index.shards)))
    return [value for shard in shards for value in shard.column(name)]


@pytest.mark.parametrize("processes", [1, 3])
def test_the_samples_are_in_the_order_of_the_source_however_many_processes_write(
    processes: int, tmp_path: Path
) -> None:
    dest, seen = str(tmp_path / "out"), []
    conversion = Conversion(lines(tmp_path, 500), dest, shard_bytes=3000, processes=processes)
    index, done = write_shards(conversion, lambda done, total: seen.append((done.samples, total)))
    assert column(dest, "x") == list(range(500))
    assert len(index.shards) >= 6
    assert (done.samples, done.skipped, index.samples) == (500, 0, 500)
    assert seen[-1] == (500, 500)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_sample_stops_the_work_and_is_named_by_its_line(processes: int, tmp_path: Path) -> None:
    source = lines(tmp_path, 300, _200='{"x": 200')
    with pytest.raises(BadSample, match="sample 200 cannot be read") as caught:
        write_shards(Conversion(source, str(tmp_path / "out"), processes=processes))
    assert caught.value.where == f"{source}, line 201"
    with pytest.raises(DataMissing):
        read_index(str(tmp_path / "out"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sample_of_another_schema_stops_the_work_and_is_named_by_its_line(processes: int, tmp_path: Path) -> None:
    source = lines(tmp_path, 300, _250='{"x": "two", "text": ""}')
    with pytest.raises(SchemaMismatch, match="sample 250 does not fit column 'x'") as caught:
        write_shards(Conversion(source, str(tmp_path / "out"), processes=processes))
    assert caught.value.where == f"{source}, line 251"
    assert caught.value.cause == "expected int64, got str 'two'"


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_samples_are_left_out_and_counted_when_asked(processes: int, tmp_path: Path) -> None:
    source = lines(tmp_path, 300, _0="x", _100='{"x": 1}', _250='{"x": "two", "text": ""}')
    conversion = Conversion(source, str(tmp_path / "out"), processes=processes, skip_bad=True)
    index, done = write_shards(conversion)
    assert done.skipped == 3
    assert (index.samples, done.samples) == (297, 297)
    assert "line 251" in done.last_skipped
    assert column(str(tmp_path / "out"), "x") == [i for i in range(300) if i not in (0, 100, 250)]


def test_what_was_asked_for_overrules_what_the_samples_show(tmp_path: Path) -> None:
    source = lines(tmp_path, 10)
    write_shards(Conversion(source, str(tmp_path / "out"), columns={"x": "float32"}))
    assert [str(c) for c in read_index(str(tmp_path / "out")).columns] == ["float32", "str"]
    with pytest.raises(SchemaMismatch, match="no column 'txt'; did you mean 'text'"):
        write_shards(Conversion(source, str(tmp_path / "b"), columns={"txt": "str"}))
    with pytest.raises(SetupError, match="0 processes"):
        write_shards(Conversion(source, str(tmp_path / "b"), processes=0))


def test_images_in_folders_and_windows_of_tokens_keep_their_kinds(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "1.png").write_bytes(png(7))
    index, _ = write_shards(Conversion(str(tmp_path / "pictures"), str(tmp_path / "a")))
    assert {c.name: str(c) for c in index.columns} == {"image": "image", "label": "int64"}
    np.arange(100, dtype="<u2").tofile(tmp_path / "t.bin")
    index, _ = write_shards(Conversion(str(tmp_path / "t.bin"), str(tmp_path / "b"), options={"length": 9}))
    assert [str(c) for c in index.columns] == ["uint16[10]"]
    assert np.stack(column(str(tmp_path / "b"), "tokens"))[2].tolist() == list(range(18, 28))


def test_a_process_that_is_killed_ends_the_work_with_its_name(tmp_path: Path) -> None:
    source, children = tmp_path / "a.jsonl", Path(f"/proc/self/task/{os.getpid()}/children")
    source.write_text('{"x": 1}\n' * 300_000)  # far more than they can write before the first report arrives

    def kill_all(done: Progress, total: int) -> None:
        del done, total
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)

    with pytest.raises(WorkerLost, match="that write shards was lost") as caught:
        write_shards(Conversion(str(source), str(tmp_path / "out"), processes=2), kill_all)
    assert "code -9" in caught.value.cause
    assert not (tmp_path / "out" / "index.json").exists()


def run(*arguments: str) -> str:
    """What a command prints; what it raises is raised."""
    result = CliRunner().invoke(data_app, list(arguments), standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_the_commands_write_check_and_show_a_set_of_shards(tmp_path: Path) -> None:
    source, dest = lines(tmp_path, 100), str(tmp_path / "out")
    said = run("write", source, dest, "--shard-bytes", "1k", "--column", "x=int32", "--level", "1")
    index = read_index(dest)
    assert f"written  100 samples in {len(index.shards)} shards" in said
    assert index.hash in said
    assert f"good     100 samples in {len(index.shards)} shards" in run("check", dest)
    shown = run("show", dest, "--sample", "99")
    assert "x     int32  int 99" in shown
    assert "text  str    str 'line 99'" in shown


def test_check_names_every_bad_shard_and_fails(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    index, _ = write_shards(Conversion(lines(tmp_path, 100), str(dest), shard_bytes=1000))
    spoilt = dest / index.shards[1].file
    data = bytearray(spoilt.read_bytes())
    data[len(data) // 2] ^= 1
    spoilt.write_bytes(data)
    (dest / index.shards[2].file).unlink()
    (dest / index.shards[3].file).write_bytes((dest / index.shards[3].file).read_bytes()[:-1])
    with pytest.raises(DataDamaged, match=f"3 of {len(index.shards)} shards") as caught:
        run("check", str(dest))
    assert [name in caught.value.cause for name in (spoilt.name, index.shards[2].file, index.shards[3].file)] == [
        True
    ] * 3


@pytest.mark.parametrize(
    "arguments",
    [("--shard-bytes", "many"), ("--shard-bytes", "5Zi"), ("--column", "x"), ("--option", "=3"), ("--column", "x=")],
)
def test_an_option_that_cannot_be_understood_is_an_error(arguments: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run("write", lines(tmp_path, 3), str(tmp_path / "out"), *arguments)


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("64Mi", 64 << 20), ("2MB", 2_000_000), ("1GiB", 1 << 30)])
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert _bytes(text) == size
