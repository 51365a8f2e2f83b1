# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as one file that needs no Unisono: safetensors, or a `torch.save` state dict.

The values go from chunk to file piece by piece, each chunk verified before its bytes are used, so that no more than two
chunks are in memory. The file appears whole or not at all. Called by ``unisono checkpoint export``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from unisono.checkpoint.header import encode_header
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.reading import ChunkReader
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.specs import TensorSpec
from unisono.checkpoint.store import Store
from unisono.checkpoint.torch_file import write_torch_file
from unisono.core.errors import UsageError

Form = Literal["safetensors", "torch"]
WEIGHTS = "model."
_FORMS: dict[str, Form] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def form_of(path: Path) -> Form:
    if path.suffix not in _FORMS:
        raise UsageError(f"{path} does not say what kind of file it should be", do=f"end it in {', '.join(_FORMS)}")
    return _FORMS[path.suffix]


def export(
    store: Store,
    manifest: Manifest,
    path: Path,
    prefix: str = WEIGHTS,
    form: Form | None = None,
    seal: Seal | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """The tensors whose names begin with `prefix`, without it; all of them if it is empty. Returns how many."""
    form = form or form_of(path)
    names = {name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix) and name != prefix}
    if not names:
        raise UsageError(
            f"the checkpoint of step {manifest.step} has no tensors that begin with {prefix!r}",
            do=f"it has {', '.join(sorted({name.partition('.')[0] for name in manifest.tensors})) or 'none at all'}",
        )
    specs = {short: manifest.tensors[names[short]].spec for short in sorted(names)}
    reader = _Pieces(ChunkReader(store, manifest, seal), manifest, names, on_progress)
    try:
        with _appearing_whole(path) as scratch:
            if form == "torch":
                write_torch_file(scratch, specs, (reader.of(short) for short in specs))
            else:
                _write_safetensors(scratch, specs, reader)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", do="choose another place, or make room") from None
    return len(names)


def _write_safetensors(path: Path, specs: Mapping[str, TensorSpec], reader: _Pieces) -> None:
    header, extents = encode_header(specs)
    with path.open("wb") as file:
        file.write(header)
        for short in extents:
            for data in reader.of(short):
                file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _Pieces:
    """The bytes of tensors, by their names in the file."""

    def __init__(
        self,
        reader: ChunkReader,
        manifest: Manifest,
        names: Mapping[str, str],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._reader, self._manifest, self._names, self._on_progress = reader, manifest, names, on_progress
        self._done, self._total = 0, sum(manifest.tensors[name].spec.bytes for name in names.values())

    def of(self, short: str) -> Iterator[memoryview]:
        name = self._names[short]
        for piece in self._manifest.tensors[name].pieces:
            data = self._reader.elements(name, piece)
            yield data
            self._done += len(data)
            if self._on_progress:
                self._on_progress(self._done, self._total)


@contextlib.contextmanager
def _appearing_whole(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place if all goes well, and is gone otherwise."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
