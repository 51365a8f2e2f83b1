# SPDX-License-Identifier: Apache-2.0
"""JSON lines: one sample a line.

Where the lines are is found once, when the dataset is made (`lines`); each is read and parsed when it is asked for. The
kinds of the columns are not known beforehand: they are inferred when shards are written.
"""

from __future__ import annotations

from unisono.data.decode import to_json
from unisono.data.lines import ManyLines
from unisono.data.place import Urls
from unisono.data.sources import Sample, Source, Transform


class JsonLines(Source):
    """``JsonLines("train.jsonl")[17]``: the 18th line, as a dictionary. What is no dictionary is under "value".

    `urls` is a file, several, a pattern such as ``s3://bucket/part-*.jsonl``, or a folder. Empty lines do not count.
    """

    def __init__(self, urls: Urls, transform: Transform | None = None) -> None:
        super().__init__(transform)
        self._lines = ManyLines(urls, (".jsonl", ".ndjson"))

    def __len__(self) -> int:
        return len(self._lines)

    def _read(self, index: int) -> Sample:
        lines, line = self._lines.locate(index)
        value = to_json(lines.read(line))
        return value if isinstance(value, dict) else {"value": value}

    def where(self, index: int) -> str:
        lines, line = self._lines.locate(index)
        return f"{lines.file.url}, line {lines.number(line)}"
