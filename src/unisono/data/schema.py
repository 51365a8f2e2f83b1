# SPDX-License-Identifier: Apache-2.0
"""What a sample consists of: named, typed columns; how they are written down, read back and guessed from samples.

`Column` stands in the index and in every shard. The short spelling (``int``, ``float32[3,?]``, ``tensor int64[128]``)
is what a person writes and what messages show. Also the errors of data that cannot be used. Torch-free; a value's
bytes are the business of `encode` and `shard`.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from unisono.core.errors import DataDamaged, SchemaMismatch, SetupError, suggest

Kind = Literal["bytes", "str", "int", "float", "array", "tensor", "image", "json"]
PLAIN = ("bytes", "str", "image", "json")  # kinds without dtype and shape
INTS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
DTYPES = (*INTS, *FLOATS, "complex64", "complex128")
BFLOAT16 = "bfloat16"  # numpy has no such type: only tensor columns have it, kept as the same bits in uint16
_MOST_DIMS, _MOST_NAME, _MOST_ELEMENTS = 16, 200, 1 << 40
_SPELLING = re.compile(r"(tensor +)?(\w+)\[([\d?, ]*)\]")
_SHOWN = 60  # characters of a value in a message


class Column(BaseModel):
    """One column: ``Column.parse("image", "uint8[28,28]")``. A None in `shape` is a length that varies."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    kind: Kind
    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None

    @field_validator("name")
    @classmethod
    def _name_can_be_shown(cls, name: str) -> str:
        if not 0 < len(name) <= _MOST_NAME or not name.isprintable():
            raise ValueError(f"a column's name has 1 to {_MOST_NAME} printable characters")
        return name

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Column:
        allowed: tuple[str | None, ...] = (None,)
        if self.kind in ("int", "float"):
            allowed = INTS if self.kind == "int" else FLOATS
        elif self.kind not in PLAIN:
            allowed = (*DTYPES, BFLOAT16) if self.kind == "tensor" else DTYPES
        if self.dtype not in allowed:
            raise ValueError(f"{self.kind} columns do not have dtype {self.dtype}")
        if (self.shape is not None) != (self.kind in ("array", "tensor")):
            raise ValueError("array and tensor columns have a shape, others none")
        dims = [size for size in self.shape or () if size is not None]
        if len(self.shape or ()) > _MOST_DIMS or any(size < 1 for size in dims) or math.prod(dims) > _MOST_ELEMENTS:
            raise ValueError(f"a shape has up to {_MOST_DIMS} lengths of 1 or more, or null where they vary")
        return self

    @functools.cached_property
    def storage(self) -> np.dtype[Any]:
        """How one element lies in a shard: little-endian, whatever the machine."""
        return np.dtype("uint16" if self.dtype == BFLOAT16 else self.dtype).newbyteorder("<")

    @functools.cached_property
    def varying(self) -> int:
        """How many lengths of its shape vary."""
        return sum(size is None for size in self.shape or ())

    @functools.cached_property
    def row_bytes(self) -> int | None:
        """Bytes of every value, or None where that differs."""
        if self.kind in PLAIN or self.varying:
            return None
        return int(self.storage.itemsize * math.prod(size or 0 for size in self.shape or ()))

    def __str__(self) -> str:
        """The short spelling, as `parse` takes it."""
        if self.shape is None:
            return self.dtype or self.kind
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{'tensor ' if self.kind == 'tensor' else ''}{self.dtype}[{sizes}]"

    @classmethod
    def parse(cls, name: str, text: str) -> Column:
        """From the short spelling: a kind, a dtype, or a dtype and a shape."""
        text = text.strip()
        try:
            if text in PLAIN:
                return cls(name=name, kind=text)  # type: ignore[arg-type]
            if text in ("int", *INTS):
                return cls(name=name, kind="int", dtype="int64" if text == "int" else text)
            if text in ("float", *FLOATS):
                return cls(name=name, kind="float", dtype="float64" if text == "float" else text)
            if match := _SPELLING.fullmatch(text):
                sizes = tuple(
                    None if size.strip() == "?" else int(size) for size in match[3].split(",") if size.strip()
                )
                return cls(name=name, kind="tensor" if match[1] else "array", dtype=match[2], shape=sizes)
        except ValueError as error:
            raise SetupError(f"column {name!r} cannot be {text!r}", cause=explain(error), do=_SPELLINGS) from None
        hint = suggest(text, (*PLAIN, "int", "float", *DTYPES))
        raise SetupError(f"column {name!r} cannot be {text!r}" + (f"; {hint}" if hint else ""), do=_SPELLINGS)


_SPELLINGS = (
    "use bytes, str, int, float, image, json, a dtype such as int32 or float32, or one with a shape:\n"
    "float32[28,28], uint8[?,?,3] where lengths vary, tensor int64[128] to get torch tensors back"
)


def parse_columns(columns: Mapping[str, str | Column] | Iterable[Column]) -> tuple[Column, ...]:
    """Columns as a person gives them: ``{"image": "image", "label": "int"}``, or `Column` objects."""
    if isinstance(columns, Mapping):
        parsed = [spec if isinstance(spec, Column) else Column.parse(name, spec) for name, spec in columns.items()]
    else:
        parsed = list(columns)
    check_names(parsed)
    return tuple(parsed)


def check_names(columns: Sequence[Column]) -> None:
    names = [column.name for column in columns]
    if not names or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), "")
        raise SetupError(f"two columns are called {twice!r}" if names else "a sample needs at least one column")


def show(value: Any) -> str:
    """A value in a message: its type, its shape if it has one, and the beginning of a short text or number."""
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        sizes = ",".join(map(str, value.shape))
        return f"{kind} {str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, str | int | float) or value is None:
        text = repr(value[:_SHOWN] if isinstance(value, str) else value)
        return f"{kind} {text[:_SHOWN]}{' …' if len(text) > _SHOWN else ''}" if value is not None else "None"
    return kind if not isinstance(value, bytes | list | tuple | dict) else f"{kind} of {len(value)}"


def is_tensor(value: Any) -> bool:
    """Without importing torch: nobody can hold a tensor who has not."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_picture(value: Any) -> bool:
    """An image object of Pillow's."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def infer_columns(samples: Sequence[Mapping[str, Any]], known: Mapping[str, str] | None = None) -> tuple[Column, ...]:
    """The columns that all of these samples fit: the narrowest kind, lengths that vary where they did.

    Those in `known` are as it says, and must be there.
    """
    names = list(samples[0])
    for number, sample in enumerate(samples):
        check_keys(names, sample, number)
    known = known or {}
    if absent := [name for name in known if name not in names]:
        hint = suggest(absent[0], map(str, names))
        raise SchemaMismatch(
            f"there is no column {absent[0]!r}" + (f"; {hint}" if hint else ""), cause=f"there are {', '.join(names)}"
        )
    columns = [
        Column.parse(name, known[name]) if name in known else _infer(name, [sample[name] for sample in samples])
        for name in names
    ]
    check_names(columns)
    return tuple(columns)


def check_keys(names: Sequence[str], sample: Mapping[str, Any], number: int) -> None:
    """Exactly these columns, in any order."""
    if not isinstance(sample, Mapping):
        raise SchemaMismatch(
            f"sample {number} is not a dictionary", cause=f"it is {show(sample)}", do='write {"name": value, ...}'
        )
    if len(sample) != len(names) or any(name not in sample for name in names):
        missing = [name for name in names if name not in sample]
        more = [str(name) for name in sample if name not in names]
        faults = [f"{word} {', '.join(which)}" for word, which in (("without", missing), ("also with", more)) if which]
        raise SchemaMismatch(
            f"sample {number} does not have the columns of the others",
            cause=f"expected {', '.join(map(str, names))}; got it {' and '.join(faults)}",
            do="give every sample the same columns; what only some have fits into a json column",
        )


def _infer(name: str, values: Sequence[Any]) -> Column:
    found = {_kind_of(value): value for value in values}
    kinds = set(found)
    if kinds <= {"int", "float"} and len(kinds) == 2:
        kinds = {"float"}
    if len(kinds) == 1:
        (kind,) = kinds
        if kind in ("array", "tensor"):
            return _infer_array(name, kind, values)
        if kind:
            return Column.parse(name, kind)
    if kinds <= {"int", "float", "bool", "str", "json"}:
        return Column(name=name, kind="json")
    shown = ", ".join(show(value) for value in found.values())
    raise SchemaMismatch(
        f"the kind of column {name!r} cannot be told from the first {len(values)} samples",
        cause=f"it holds {shown}",
        do="give every sample the same kind of value, or say the kind: columns={...}",
    )


def _kind_of(value: Any) -> str:
    """The short spelling of what holds this value; array and tensor without dtype; empty where nothing does."""
    if isinstance(value, np.generic) and not isinstance(value, np.str_ | np.bytes_):
        return str(value.dtype) if str(value.dtype) in (*INTS, *FLOATS) else ""
    if is_picture(value):
        return "image"
    for kinds, name in _PYTHON_KINDS:
        if isinstance(value, kinds):
            return name
    return "tensor" if is_tensor(value) else ""


_PYTHON_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (str, "str"),
    ((bytes, bytearray, memoryview), "bytes"),
    (np.ndarray, "array"),
    ((dict, list, tuple, type(None)), "json"),
)


def _infer_array(name: str, kind: str, values: Sequence[Any]) -> Column:
    dtypes = sorted({str(value.dtype).removeprefix("torch.").lstrip("<>=|") for value in values})
    dtypes = sorted({np.dtype(values[0].dtype).name}) if kind == "array" and len(dtypes) == 1 else dtypes
    ranks = {len(value.shape) for value in values}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise SchemaMismatch(
            f"the arrays in column {name!r} are not of one kind",
            cause=f"the first {len(values)} samples have dtypes {', '.join(dtypes)} and {sorted(ranks)} dimensions",
            do="give them one dtype and one number of dimensions; their lengths may differ",
        )
    sizes = [{int(value.shape[axis]) for value in values} for axis in range(ranks.pop())]
    shape = ",".join(str(*size) if len(size) == 1 and 0 not in size else "?" for size in sizes)
    return Column.parse(name, f"{'tensor ' if kind == 'tensor' else ''}{dtypes[0]}[{shape}]")


def explain(error: ValueError) -> str:
    """The first thing that was found wrong, and where: ``shards.3.samples: Input should be a valid integer``."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}".removeprefix(": ").replace("Value error, ", "")


def damaged(name: str, why: str, do: str = "") -> DataDamaged:
    return DataDamaged(f"{name} is damaged", cause=why, do=do or "fetch or write it again")
