# SPDX-License-Identifier: Apache-2.0
"""Data sources, readers, shards and their writer by name; everything else is imported from its own file.

``from unisono.data import mnist`` is what a script writes. Sources are loaded on first use, so that importing this
package, or `unisono.data.order`, does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.core.errors import BadSample
    from unisono.data.csv_files import CsvFile
    from unisono.data.digits import digits
    from unisono.data.folders import Folder
    from unisono.data.jsonl import JsonLines
    from unisono.data.mixing import Mixed
    from unisono.data.mnist import mnist
    from unisono.data.packing import Packed
    from unisono.data.parquet import ParquetFiles
    from unisono.data.streaming import Shards
    from unisono.data.text import TextWindows, python_source, python_text
    from unisono.data.tokens import TokenFile
    from unisono.data.webdataset import TarSamples
    from unisono.data.writer import ShardWriter

__all__ = [
    "BadSample",
    "CsvFile",
    "Folder",
    "JsonLines",
    "Mixed",
    "Packed",
    "ParquetFiles",
    "ShardWriter",
    "Shards",
    "TarSamples",
    "TextWindows",
    "TokenFile",
    "digits",
    "mnist",
    "python_source",
    "python_text",
]

_HOME = {
    "BadSample": "unisono.core.errors",
    "CsvFile": "unisono.data.csv_files",
    "Folder": "unisono.data.folders",
    "JsonLines": "unisono.data.jsonl",
    "Mixed": "unisono.data.mixing",
    "Packed": "unisono.data.packing",
    "ParquetFiles": "unisono.data.parquet",
    "ShardWriter": "unisono.data.writer",
    "Shards": "unisono.data.streaming",
    "TarSamples": "unisono.data.webdataset",
    "TextWindows": "unisono.data.text",
    "TokenFile": "unisono.data.tokens",
    "digits": "unisono.data.digits",
    "mnist": "unisono.data.mnist",
    "python_source": "unisono.data.text",
    "python_text": "unisono.data.text",
}


class _Package(ModuleType):
    """Keeps ``unisono.data.digits`` the function, also after somebody imported the file of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one that this function knows

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
