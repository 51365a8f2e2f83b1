# SPDX-License-Identifier: Apache-2.0
"""Small files of the kinds that the readers read, as bytes; and `failure`, for tests in which an error is allowed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from unisono.core.errors import UnisonoError


def png(color: int) -> bytes:
    target = io.BytesIO()
    Image.new("L", (3, 2), color).save(target, format="PNG")
    return target.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def parquet(table: dict[str, Any], rows_a_group: int = 3) -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table(table), target, row_group_size=rows_a_group)
    return target.getvalue()


def npy(array: Any) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


def failure(action: Callable[[], Any], *kinds: type[UnisonoError]) -> UnisonoError | None:
    """The error of one of these kinds in which the action ended, if it did."""
    try:
        action()
    except kinds as error:
        return error
    return None
