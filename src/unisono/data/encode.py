# SPDX-License-Identifier: Apache-2.0
"""One value into the bytes of its column, checked: what would come back changed is refused, not bent.

`encode` gives the bytes and, where lengths vary, the lengths; `Misfit` says what was expected and what came. Called by
the writer; the way back is in `shard`. Torch-free: a tensor brings its own torch.
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.core.process import describe
from unisono.data.schema import BFLOAT16, FLOATS, Column, is_picture, is_tensor, show

_CODES = dict(zip(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    ("?", "<b", "<h", "<i", "<q", "B", "<H", "<I", "<Q", "<e", "<f", "<d"), strict=True,
))  # fmt: skip
_NUMBERS = {dtype: struct.Struct(code) for dtype, code in _CODES.items()}
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # what comes back from PNG as it was
Encoded = tuple[bytes | memoryview, tuple[int, ...]]  # the value, and those of its lengths that vary


class Misfit(Exception):
    """A value that its column cannot hold."""

    def __init__(self, column: Column, value: Any, why: str = "") -> None:
        super().__init__(why)
        self.expected, self.got, self.why = str(column), show(value), why


def encode(column: Column, value: Any) -> Encoded:
    return _ENCODERS[column.kind](column, value)


def _text(column: Column, value: Any) -> Encoded:
    if not isinstance(value, str):
        raise Misfit(column, value)
    try:
        return value.encode(), ()
    except UnicodeEncodeError as error:
        raise Misfit(column, value, f"it has half a character (surrogate) at {error.start}") from None


def _bytes(column: Column, value: Any) -> Encoded:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise Misfit(column, value)
    return bytes(value), ()


def _image(column: Column, value: Any) -> Encoded:
    if is_picture(value):
        return _picture(column, value), ()
    data, lengths = _bytes(column, value)
    if not data:
        raise Misfit(column, value, "an encoded image is not empty")
    return data, lengths


def _int(column: Column, value: Any) -> Encoded:
    if type(value) is not int:
        value = _plain_number(value)
        truth = isinstance(value, bool | np.bool_)
        if truth != (column.dtype == "bool") or not (truth or isinstance(value, int | np.integer)):
            raise Misfit(column, value)
    elif column.dtype == "bool":
        raise Misfit(column, value)
    return _packed(column, value), ()


def _float(column: Column, value: Any) -> Encoded:
    if type(value) is float:
        return _packed(column, value), ()
    value = _plain_number(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise Misfit(column, value)
    packed = _packed(column, value)
    if isinstance(value, int | np.integer) and _NUMBERS[str(column.dtype)].unpack(packed)[0] != value:
        raise Misfit(column, value, f"{column.dtype} would round it")
    return packed, ()


def _packed(column: Column, value: Any) -> bytes:
    try:
        return _NUMBERS[str(column.dtype)].pack(value)
    except (struct.error, OverflowError):
        raise Misfit(column, value, f"out of range for {column.dtype}") from None


def _plain_number(value: Any) -> Any:
    return value.item() if is_tensor(value) and value.dim() == 0 else value


def _array(column: Column, value: Any) -> Encoded:
    array, wanted = _as_numpy(column, value), column.shape
    assert wanted is not None
    varying: tuple[int, ...] = ()
    if array.shape != wanted:
        if array.ndim != len(wanted) or any(w not in (None, s) for w, s in zip(wanted, array.shape, strict=True)):
            raise Misfit(column, value)
        varying = tuple(size for want, size in zip(wanted, array.shape, strict=True) if want is None)
    whole = np.ascontiguousarray(array, dtype=column.storage)
    return whole.reshape(-1).view(np.uint8).data if whole.size else b"", varying


def _as_numpy(column: Column, value: Any) -> np.ndarray[Any, Any]:
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        whole = value.detach().cpu().contiguous()
        if dtype != column.dtype or whole.is_sparse or whole.is_quantized:
            raise Misfit(column, value)
        plain = whole.view(sys.modules["torch"].int16) if dtype == BFLOAT16 else whole.resolve_conj().resolve_neg()
        array: np.ndarray[Any, Any] = plain.numpy()
        return array.view(np.uint16) if dtype == BFLOAT16 else array
    if isinstance(value, np.ndarray | np.generic):
        if column.dtype == BFLOAT16 or value.dtype.name != column.dtype:
            raise Misfit(column, value)
        return np.asarray(value)
    if isinstance(value, list | tuple) and column.dtype != BFLOAT16:
        return _from_list(column, value)
    raise Misfit(column, value)


def _from_list(column: Column, value: Any) -> np.ndarray[Any, Any]:
    """Lists, as JSON has them. Whole numbers must stay what they are; reals may round, but not to infinity."""
    try:
        given = np.array(value)
        if given.dtype.kind not in "biufc":
            if given.size:
                raise Misfit(column, value, "the list holds more than numbers")
            given = given.astype(column.storage)
        with np.errstate(all="ignore"):
            cast = given.astype(column.storage)
            reals = column.dtype in FLOATS or str(column.dtype).startswith("complex")
            same = np.isfinite(cast) == np.isfinite(given) if reals else cast == given
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise Misfit(column, value, describe(error)) from None
    mixed = given.size and (column.dtype == "bool") != (given.dtype.kind == "b")
    if mixed or not np.all(same):
        raise Misfit(column, value, f"not every number in the list fits {column.dtype}")
    return cast


def _json(column: Column, value: Any) -> Encoded:
    try:
        _keys_are_texts(column, value)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        try:
            return text.encode(), ()
        except UnicodeEncodeError:  # half characters survive only when they are spelt out
            return json.dumps(value, separators=(",", ":")).encode(), ()
    except (TypeError, ValueError, RecursionError) as error:
        raise Misfit(column, value, describe(error)) from None


def _keys_are_texts(column: Column, value: Any) -> None:
    """JSON would turn other keys into texts without a word."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise Misfit(column, value, f"a key of a dictionary in JSON is a text, not {show(key)}")
            _keys_are_texts(column, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            if isinstance(inner, dict | list | tuple):
                _keys_are_texts(column, inner)


def _picture(column: Column, value: Any) -> bytes:
    """Losslessly: whoever wants JPEG gives its bytes."""
    if value.mode not in _PNG_MODES:
        raise Misfit(column, value, f"PNG would change an image of mode {value.mode}: give encoded bytes, or an array")
    target = io.BytesIO()
    try:
        value.save(target, format="PNG")
    except (OSError, ValueError, KeyError) as error:
        raise Misfit(column, value, describe(error)) from None
    return target.getvalue()


_ENCODERS: dict[str, Callable[[Column, Any], Encoded]] = {
    "bytes": _bytes,
    "str": _text,
    "int": _int,
    "float": _float,
    "array": _array,
    "tensor": _array,
    "image": _image,
    "json": _json,
}
