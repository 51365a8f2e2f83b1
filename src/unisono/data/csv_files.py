# SPDX-License-Identifier: Apache-2.0
"""CSV: a table of texts with names above it. Where the records are is found once; each is parsed when it is asked for.

Quotes are those of RFC 4180: a field that begins with one ends with one, and two within mean one. Whether a column
holds whole numbers, numbers or texts is inferred from the first records; one that does not keep to it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unisono.core.errors import SchemaMismatch, SetupError
from unisono.data.decode import Undecodable, to_str
from unisono.data.lines import Lines, ManyLines
from unisono.data.place import Urls
from unisono.data.schema import damaged
from unisono.data.sources import Sample, Source, Transform

_FIRST_RECORDS = 100
# What is taken for a number unasked: 007 is the number of an agent, not 7.
_INT = re.compile(r"0|-?[1-9]\d{0,17}")
_FLOAT = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?|nan|NaN|[+-]?inf")
_TYPES = ("int", "float", "str")


class CsvFile(Source):
    """``CsvFile("train.csv")[17]``: the 18th record, ``{"name": value}``.

    `delimiter` is a comma, in files that end in .tsv a tab. Without `header`, columns are called "0", "1" and so on.
    `types` says what a column holds where the guess is wrong: ``{"zip": "str"}``. `quotes` False takes quotes as text.
    """

    def __init__(
        self,
        urls: Urls,
        delimiter: str | None = None,
        header: bool = True,
        types: Mapping[str, str] | None = None,
        quotes: bool = True,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(transform)
        self._header, self._quotes = header, quotes
        self._lines = ManyLines(urls, (".csv", ".tsv"), '"' if quotes else None, 1 if header else 0)
        tabs = self._lines.files[0].file.url.lower().endswith(".tsv")
        self.delimiter = delimiter or ("\t" if tabs else ",")
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise SetupError(f"delimiter={delimiter!r} must be one character", do='such as "," or ";"')
        between = re.escape(self.delimiter)
        self._field = re.compile(rf'(?:"((?:[^"]++|"")*+)"|([^"{between}]*))(?:{between}|\Z)')
        self.names = self._head()
        self.columns = self._types(types or {})

    def __len__(self) -> int:
        return len(self._lines)

    def _head(self) -> list[str]:
        """The names of the columns, which must be the same in every file."""
        files = [file for file in self._lines.files if len(file)]
        heads = [_first_record(file, self._split) for file in files]
        if not self._header:
            return [str(number) for number in range(len(heads[0]))]
        for file, head in zip(files, heads, strict=True):
            if head != heads[0]:
                cause = f"{', '.join(head)}\nand {', '.join(heads[0])}"
                raise SchemaMismatch(f"{file.file.url} has other columns than {files[0].file.url}", cause=cause)
        if len(set(heads[0])) < len(heads[0]) or "" in heads[0]:
            raise SchemaMismatch(
                f"the columns of {files[0].file.url} have no names, or two the same",
                cause=f"its first line: {heads[0]}",
                do="correct the first line; if it is a record already: header=False",
            )
        return heads[0]

    def _types(self, asked: Mapping[str, str]) -> dict[str, str]:
        for name, kind in asked.items():
            if name not in self.names or kind not in _TYPES:
                raise SetupError(
                    f"types={{{name!r}: {kind!r}}} cannot be",
                    do=f"the columns are {', '.join(self.names)}; each is {', '.join(_TYPES)}",
                )
        first = [self._texts(index) for index in range(min(_FIRST_RECORDS, len(self)))]
        return {
            name: asked.get(name) or _guess([texts[number] for texts in first])
            for number, name in enumerate(self.names)
        }

    def _read(self, index: int) -> Sample:
        texts = self._texts(index)
        return {name: _typed(name, self.columns[name], text) for name, text in zip(self.names, texts, strict=True)}

    def _texts(self, index: int) -> list[str]:
        lines, line = self._lines.locate(index)
        texts: list[str] = self._tried(index, self._split, lines.read(line))
        if len(texts) != len(self.names):
            why = f"it has {len(texts)} fields, and the table {len(self.names)} columns"
            raise self._bad(index, f"sample {index} cannot be read", why)
        return texts

    def _split(self, record: bytes) -> list[str]:
        text = to_str(record)
        if not self._quotes or '"' not in text:
            return text.split(self.delimiter)
        fields, at, more = [], 0, True
        while more:
            match = self._field.match(text, at)
            if match is None:
                raise Undecodable(f"a quote stands within a field, at character {at} of the record or later")
            fields.append(match[2] if match[1] is None else match[1].replace('""', '"'))
            at, more = match.end(), match[0].endswith(self.delimiter)
        return fields

    def where(self, index: int) -> str:
        lines, line = self._lines.locate(index)
        return f"{lines.file.url}, record {lines.number(line)}, at byte {int(lines.starts[line]):,}"


def _first_record(file: Lines, split: Callable[[bytes], list[str]]) -> list[str]:
    try:
        return split(file.read(0))
    except Undecodable as error:
        raise damaged(file.file.url, f"its first line: {error}", "correct it") from None


def _guess(texts: list[str]) -> str:
    if all(_INT.fullmatch(text) for text in texts):
        return "int"
    return "float" if all(_FLOAT.fullmatch(text.strip()) for text in texts) else "str"


def _typed(name: str, kind: str, text: str) -> Any:
    if kind == "str":
        return text
    try:
        if "_" in text:  # Python's own way of writing numbers
            raise ValueError
        return int(text) if kind == "int" else float(text)
    except ValueError:
        hint = f"; if that is right: types={{{name!r}: ...}}"
        raise Undecodable(f"column {name!r}: expected {kind}, got {text[:60]!r}{hint}") from None
