# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in loader processes, in words: an exception in the dataset, or the death of the process itself.

An exception travels as text, for exceptions of user code need not survive pickling. A death torch reports from a signal
handler, at any line of the worker's, so `explain_death` is asked by the loader and by the worker's main alike.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from unisono.core import process
from unisono.core.errors import ScriptFailed, UnisonoError, WorkerLost, from_dict

_TENSOR_ARRIVES = os.path.join("torch", "multiprocessing", "reductions.py")
_SHOWN_IDS = 8


@dataclass(frozen=True)
class Failure:
    """An exception in a loader process, on its way to the worker; `ids` of the samples that it was reading."""

    described: str
    where: str
    trace: str
    ids: list[int]
    known: dict[str, Any] | None = None  # an error of ours: it keeps its code and its words


def failure_of(error: Exception, ids: list[int]) -> Failure:
    known = error.as_dict() if isinstance(error, UnisonoError) else None
    trace = getattr(error, "trace", "") or traceback.format_exc()
    return Failure(process.describe(error), process.user_line(error), trace, ids, known)


def raise_here(failure: Failure) -> NoReturn:
    ids = ", ".join(map(str, failure.ids[:_SHOWN_IDS])) + (", …" if len(failure.ids) > _SHOWN_IDS else "")
    reading = f", while reading samples {ids}" if ids else ""
    found = from_dict(failure.known) if failure.known else process.out_of_memory(failure.described, failure.where)
    error = found or ScriptFailed(
        failure.described,
        where=failure.where,
        cause=f"raised by the dataset in a loader process{reading}",
    )
    error.trace = failure.trace
    raise error


def explain_death(error: BaseException | None) -> WorkerLost | None:
    """In words, if this is about a loader process that died; or if a tensor was on its way when it did."""
    while error is not None:
        cause = ""
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            cause = str(error).splitlines()[0]
        elif isinstance(error, ConnectionError | EOFError | FileNotFoundError):
            frames = traceback.extract_tb(error.__traceback__)
            if any(frame.filename.endswith(_TENSOR_ARRIVES) for frame in frames):
                cause = f"it was gone while it sent a batch ({process.describe(error)})"
        if cause:
            return WorkerLost(
                "a loader process died",
                cause=cause,
                do="often memory: lower loader_processes or prefetch; or look in the worker's log",
            )
        error = error.__cause__ or error.__context__
    return None
