# SPDX-License-Identifier: Apache-2.0
"""From the bytes of one value back to the value: texts, JSON, images. Nothing here can run code.

Raises `Undecodable` with the reason; the caller knows the file and the sample and says so. Called by `shard` and by
the readers of other formats. Pillow is imported when the first image is decoded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from unisono.core.errors import SetupError
from unisono.core.process import describe

Bytes = bytes | memoryview


class Undecodable(Exception):
    """Bytes that are not what their column says."""


def to_bytes(data: Bytes) -> bytes:
    return bytes(data)


def to_str(data: Bytes) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise Undecodable(f"not UTF-8: {error.reason} at byte {error.start}") from None


def to_json(data: Bytes) -> Any:
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:  # also what is not UTF-8, and numbers of absurd length
        raise Undecodable(f"not JSON: {error}") from None


def to_image(data: Bytes) -> Any:
    """An image of Pillow's, fully read, so that a truncated one fails here and not in the transform."""
    try:
        from PIL import Image
    except ImportError as error:
        raise SetupError(
            "the data has images, and Pillow, which decodes them, cannot be imported",
            cause=str(error),
            do='pip install "unisono[images]"; or take the encoded bytes: decode=False',
        ) from None
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except Exception as error:  # whatever its many decoders raise
        raise Undecodable(f"not an image that Pillow can read: {describe(error)}") from None
    return image


DECODERS: dict[str, Callable[[Bytes], Any]] = {
    "bytes": to_bytes,
    "str": to_str,
    "json": to_json,
    "image": to_image,
}
