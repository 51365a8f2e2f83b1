# SPDX-License-Identifier: Apache-2.0
"""Several processes that write shards, each one run of the samples: starting them, listening to them, being one.

A process gets its order as JSON on stdin and answers in JSON lines: how far it is and, at the end, its shards or its
error. Nothing is pickled; a process dies with the one that started it. Called by `convert`; run as
``python -m unisono.data.convert_parts`` by itself.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from unisono.core.errors import InternalError, UnisonoError, WorkerLost, from_dict
from unisono.core.process import describe, die_with_parent
from unisono.data.convert import Conversion, Progress, write_part
from unisono.data.index import ShardEntry
from unisono.data.schema import Column
from unisono.data.sources import open_source

_REPORT_EVERY_S = 0.2
_Answers = queue.Queue[tuple[int, dict[str, Any]]]


def write_parts(
    conversion: Conversion, columns: Sequence[Column], parts: Sequence[range], tick: Callable[[Progress], None]
) -> tuple[list[ShardEntry], Progress]:
    """The shards of all parts, in the order of the parts. The first failure ends them all."""
    answers: _Answers = queue.Queue()
    done = [Progress() for _ in parts]
    entries: dict[int, list[ShardEntry]] = {}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, part in enumerate(parts):
            processes.append(_start(conversion, columns, number, part))
            threading.Thread(target=_listen, args=(number, processes[-1], answers), daemon=True).start()
        while len(entries) < len(parts):
            number, answer = answers.get()
            if "error" in answer:
                raise from_dict(answer["error"])
            if "code" in answer and number not in entries:
                raise WorkerLost(
                    f"process {number} of {len(parts)} that write shards was lost",
                    cause=f"it ended with code {answer['code']}; often for want of memory",
                    do="start again with fewer processes or smaller shards",
                )
            if "progress" in answer:
                done[number] = Progress(**answer["progress"])
                tick(_sum(done))
            if "entries" in answer:
                entries[number] = [ShardEntry(**entry) for entry in answer["entries"]]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [entry for number in range(len(parts)) for entry in entries[number]], _sum(done)


def _start(conversion: Conversion, columns: Sequence[Column], number: int, part: range) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "unisono.data.convert_parts"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    order = {
        "conversion": asdict(conversion),
        "columns": [column.model_dump(mode="json") for column in columns],
        "part": [part.start, part.stop],
        "prefix": f"shard-{number:03d}-",
    }
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has died; whoever listens will hear of it
    return process


def _listen(number: int, process: subprocess.Popen[bytes], answers: _Answers) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put((number, json.loads(line)))
    answers.put((number, {"code": process.wait()}))


def _sum(parts: Sequence[Progress]) -> Progress:
    return Progress(
        sum(part.samples for part in parts),
        sum(part.raw_bytes for part in parts),
        sum(part.skipped for part in parts),
        next((part.last_skipped for part in reversed(parts) if part.last_skipped), ""),
    )


def main() -> None:
    """One of the processes."""
    die_with_parent()
    order = json.load(sys.stdin)
    conversion, done = Conversion(**order["conversion"]), Progress()
    columns = [Column.model_validate_json(json.dumps(column)) for column in order["columns"]]
    last_s = 0.0

    def tick() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _REPORT_EVERY_S:
            last_s = time.monotonic()
            _say({"progress": asdict(done)})

    try:
        source = open_source(conversion.source, conversion.kind, conversion.options)
        entries = write_part(source, conversion, columns, range(*order["part"]), done, tick, order["prefix"])
    except UnisonoError as error:
        _say({"error": error.as_dict()})
    except Exception as error:
        _say({"error": InternalError(describe(error), cause="a fault in Unisono itself").as_dict()})
        raise
    else:
        _say({"progress": asdict(done), "entries": [entry.model_dump(mode="json") for entry in entries]})


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
