# SPDX-License-Identifier: Apache-2.0
"""Token files: one long row of token ids, plain (.bin) or of numpy's (.npy), cut into windows for language models.

A local file is mapped into memory and costs none; on other storage each window is one ranged read. The ids are not
copied, converted or checked before they are asked for.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.core.errors import EmptyData, SetupError
from unisono.core.process import describe
from unisono.data.decode import Undecodable
from unisono.data.place import FileBytes
from unisono.data.schema import INTS, damaged
from unisono.data.sources import Sample, Source, Transform

_WHOLE = tuple(dtype for dtype in INTS if dtype != "bool")
_LONGEST_HEADER = 1 << 16


class TokenFile(Source):
    """Windows of a token file: sample i is `length` ids from ``i * stride`` on, and the same shifted by one.

        data = TokenFile("train.bin", length=1024)
        inputs, targets = data[0]               # both (1024,) int64

    `dtype` and `skip_bytes` (a header) concern .bin; an .npy file says it itself. With `vocabulary`, an id that is not
    below it is an error: the usual sign of a wrong dtype. `stride` is `length` if not given.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        length: int,
        stride: int | None = None,
        dtype: str = "uint16",
        skip_bytes: int = 0,
        vocabulary: int | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(transform)
        self.length, self.stride, self.vocabulary = length, length if stride is None else stride, vocabulary
        if self.length < 1 or self.stride < 1 or skip_bytes < 0 or dtype not in _WHOLE:
            raise SetupError(
                f"TokenFile(length={length}, stride={stride}, dtype={dtype!r}, skip_bytes={skip_bytes}) makes no sense",
                do=f"length and stride are 1 or more, dtype is one of {', '.join(_WHOLE)}",
            )
        self.file = FileBytes(url)
        self.dtype, self.start, self.count = np.dtype(dtype).newbyteorder("<"), skip_bytes, 0
        if self.file.url.lower().endswith(".npy"):
            self._read_npy_header()
        else:
            self.count, rest = divmod(max(0, self.file.size - skip_bytes), self.dtype.itemsize)
            if rest:
                raise damaged(
                    self.file.url,
                    f"{self.file.size - skip_bytes:,} bytes are no whole number of {self.dtype.name}",
                    "say what it holds: dtype=..., skip_bytes=...; or copy it again",
                )
        if self.count < length + 1:
            raise EmptyData(
                f"{self.file.url} is too short for one window",
                cause=f"it has {self.count:,} ids, a window needs {length + 1:,}",
                do="use a smaller length, or a longer file",
            )
        self.columns = {"tokens": f"{self.dtype.name}[{length + 1}]"}
        self._mapped: NDArray[Any] | None = None

    def _read_npy_header(self) -> None:
        head = io.BytesIO(self.file.read(0, min(self.file.size, _LONGEST_HEADER)))
        try:
            version = np.lib.format.read_magic(head)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(head)
        except (ValueError, EOFError) as error:
            raise damaged(self.file.url, f"no header of an .npy file: {describe(error)}") from None
        if len(shape) != 1 or dtype.name not in _WHOLE:
            shown = f"{dtype}[{','.join(map(str, shape))}]"
            raise damaged(self.file.url, f"it holds {shown}, and not one row of whole numbers", "write it as such")
        self.dtype, self.start, self.count = dtype, head.tell(), int(shape[0])
        if self.file.size != self.start + self.count * dtype.itemsize:
            raise damaged(self.file.url, f"its {self.file.size:,} bytes are not what its header says")

    def __len__(self) -> int:
        return (self.count - self.length - 1) // self.stride + 1

    def _windows(self, indices: Sequence[int]) -> NDArray[Any]:
        """(len(indices), length + 1), as they lie in the file."""
        size = self.length + 1
        if self.file.local is None:
            width = self.dtype.itemsize
            places = [self.start + index * self.stride * width for index in indices]
            return np.stack([np.frombuffer(self.file.read(at, size * width), self.dtype) for at in places])
        if self._mapped is None:
            self._mapped = np.memmap(self.file.local, self.dtype, "r", self.start, shape=(self.count,))
        starts = np.asarray(indices, dtype=np.int64) * self.stride
        windows: NDArray[Any] = np.asarray(self._mapped[starts[:, None] + np.arange(size)])
        return windows

    def _read_many(self, indices: Sequence[int]) -> list[Sample]:
        if not len(indices):
            return []
        windows = self._windows(indices)
        if self.vocabulary is not None:
            bad = np.flatnonzero(((windows < 0) | (windows >= self.vocabulary)).any(axis=1))
            if len(bad):
                why = f"an id of {windows[bad[0]].max()} is not below the vocabulary of {self.vocabulary}"
                raise self._bad(indices[bad[0]], f"sample {indices[bad[0]]} cannot be read", why)
        return [{"tokens": window} for window in windows.astype(windows.dtype.newbyteorder("="), copy=False)]

    def _finish(self, sample: Sample) -> Any:
        import torch

        window = sample["tokens"]
        if window.dtype == np.uint64 and (window >> np.uint64(63)).any():
            raise Undecodable("an id does not fit into int64")
        ids = torch.from_numpy(window.astype(np.int64))
        return ids[:-1], ids[1:].clone()  # a copy: masking inputs in place must not change targets

    def where(self, index: int) -> str:
        start = index * self.stride
        return f"{self.file.url}, ids {start:,} to {start + self.length:,}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}
