# SPDX-License-Identifier: Apache-2.0
"""How a vector is cut into pieces: aligned and even. Pure; every algorithm that shares a vector out uses it."""

from __future__ import annotations

_ALIGNMENT = 16  # elements; slices start on cache lines


def slices(length: int, parts: int, alignment: int = _ALIGNMENT) -> tuple[slice, ...]:
    """The slice of a vector that each rank owns: aligned, as even as that allows, possibly empty."""
    rows = -(-length // alignment)
    bounds = [min(length, (rows * i // parts) * alignment) for i in range(parts)] + [length]
    return tuple(slice(bounds[i], bounds[i + 1]) for i in range(parts))


def length_of(part: slice) -> int:
    return int(part.stop - part.start)


def shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
