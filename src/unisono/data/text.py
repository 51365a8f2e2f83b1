# SPDX-License-Identifier: Apache-2.0
"""Text that every Python already has: the source of its standard library, cut into windows of bytes.

`python_source` reads it, `TextWindows` is the dataset, `python_text` is both with a train and a test part. Tokens are
bytes, so the vocabulary is 256. The text is the same wherever the same build of Python runs; another version is
another text. Called by scripts and examples; order and batches are made elsewhere.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono.core.errors import EmptyData, SetupError

# Packages that were installed later; tests, which many distributions leave out; tables that no person wrote.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# Files and folders that hold one machine's paths and settings.
_LOCAL = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


def python_source(max_bytes: int | None = None) -> bytes:
    """The standard library's own ``.py`` files, joined in the order of their paths; at most `max_bytes` of them.

    Left out: installed packages, tests, generated tables (``encodings``, ``pydoc_data``), settings of this machine.
    """
    if max_bytes is not None and max_bytes < 1:
        raise SetupError(f"python_source(max_bytes={max_bytes}) asks for no text", do="use a positive number, or None")
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(_source_files(root)):
        text += (root / path).read_bytes()
        if max_bytes is not None and len(text) >= max_bytes:
            return bytes(text[:max_bytes])
    if not text:
        raise EmptyData(
            f"there is no Python source in {root}",
            cause="this Python came without the source of its standard library",
            do="use another text: TextWindows(Path(...).read_bytes(), length=128)",
        )
    return bytes(text)


def _source_files(root: Path) -> Iterator[str]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith(_LOCAL)]
        for name in files:
            if name.endswith(".py") and not name.startswith(_LOCAL):
                yield Path(folder, name).relative_to(root).as_posix()


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a byte string: sample i is `length` bytes from ``i * stride`` on, and the same shifted by one.

        data = TextWindows(Path("book.txt").read_bytes(), length=128)
        inputs, targets = data[0]               # both (128,) int64, 0..255

    `stride` is `length` if not given: then every byte but the first is a target at most once.
    """

    vocabulary: ClassVar[int] = 256

    def __init__(self, text: bytes, length: int, stride: int | None = None) -> None:
        self.length, self.stride = length, length if stride is None else stride
        if self.length < 1 or self.stride < 1:
            raise SetupError(f"TextWindows(length={length}, stride={stride}): both must be 1 or more")
        if len(text) < length + 1:
            raise EmptyData(
                f"the text is too short for one window: it has {len(text)} bytes, a window needs {length + 1}",
                do="use a longer text or a smaller length; for a test part, a larger test_fraction or max_bytes",
            )
        self.tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self._window = torch.arange(length + 1)

    def __len__(self) -> int:
        return (len(self.tokens) - self.length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self._start(index)
        window = self.tokens[start : start + self.length + 1].long()
        return window[:-1], window[1:].clone()  # a copy: masking inputs in place must not change targets

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Many samples in one read; the same values as one by one."""
        starts = torch.tensor([self._start(index) for index in indices], dtype=torch.int64)
        windows = self.tokens[starts[:, None] + self._window].long()  # (samples, length + 1)
        return list(zip(windows[:, :-1], windows[:, 1:].clone(), strict=True))

    def _start(self, index: int) -> int:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count}")
        return (index % count) * self.stride


def python_text(
    length: int = 128, max_bytes: int | None = 4_000_000, test_fraction: float = 0.05
) -> tuple[TextWindows, TextWindows]:
    """The standard library's source as train and test windows; the test part is the tail of the text.

    train, test = python_text(length=128)
    """
    if not 0 < test_fraction < 1:
        raise SetupError(f"python_text(test_fraction={test_fraction}): use a fraction between 0 and 1, such as 0.05")
    text = python_source(max_bytes)
    cut = len(text) - int(len(text) * test_fraction)
    return TextWindows(text[:cut], length), TextWindows(text[cut:], length)
