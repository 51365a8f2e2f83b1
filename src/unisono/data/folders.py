# SPDX-License-Identifier: Apache-2.0
"""Files in folders, one folder for each class: what torchvision calls an ImageFolder, on any storage.

The files are listed once, sorted; each is read when it is asked for. What lies where none is expected is an error: a
file beside the class folders, or a folder that is not among the classes asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from unisono.core.errors import EmptyData, SchemaMismatch
from unisono.data.place import Place
from unisono.data.sources import Sample, Source, Transform

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class Folder(Source):
    """``Folder("train")[17]``: ``{"image": ..., "label": 3}``, or "data", the bytes, where the files are no images.

    `classes` are the names of the folders, sorted, and the label is a name's number. Give ``classes=train.classes`` to
    the test set: a class without files would otherwise shift the numbers. Files directly in `url` have no label.
    `extensions` takes only files that end so; hidden files never count.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        extensions: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        transform: Transform | None = None,
        decode: bool = True,
    ) -> None:
        super().__init__(transform, decode)
        self.place = Place(url)
        endings = tuple(extensions or ())
        self.files = [
            path
            for path in self.place.walk()
            if path.lower().endswith(endings or "") and not any(part.startswith(".") for part in path.split("/"))
        ]
        if not self.files:
            ending = f" ending in {' or '.join(endings)}" if endings else ""
            raise EmptyData(
                f"there are no files{ending} in {self.place.url}", do="check the address and the extensions"
            )
        self.classes = self._classes(classes)
        self._labels = {name: number for number, name in enumerate(self.classes)}
        self.holds_images = all(path.lower().endswith(PICTURES) for path in self.files)
        self.columns = {"image": "image"} if self.holds_images else {"data": "bytes"}
        if self.classes:
            self.columns["label"] = "int"

    def _classes(self, asked: Sequence[str] | None) -> list[str]:
        above = [path for path in self.files if "/" not in path]
        found = sorted({path.split("/", 1)[0] for path in self.files if "/" in path})
        if above and (found or asked is not None):
            raise SchemaMismatch(
                f"{self.place.name(above[0])} lies beside the folders of the classes, and has none",
                cause=f"{len(above)} such files, and the folders {', '.join(found[:10])}",
                do='move it away, or take only some files: extensions=[".jpg"]',
            )
        for name in found if asked is not None else ():
            if name not in (asked or ()):
                shown = ", ".join(list(asked or ())[:10])
                raise SchemaMismatch(f"{self.place.name(name)} is not one of the classes", cause=f"they are {shown}")
        return list(asked) if asked is not None else found

    def __len__(self) -> int:
        return len(self.files)

    def _read_many(self, indices: Sequence[int]) -> list[Sample]:
        paths, name = [self.files[index] for index in indices], "image" if self.holds_images else "data"
        samples: list[Sample] = [{name: data} for data in self.place.read_many(paths)]
        for path, sample in zip(paths, samples, strict=True) if self.classes else ():
            sample["label"] = self._labels[path.split("/", 1)[0]]
        return samples

    def where(self, index: int) -> str:
        return self.place.name(self.files[index])
