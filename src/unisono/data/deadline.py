# SPDX-License-Identifier: Apache-2.0
"""A deadline for work that has none of its own: a storage whose answer never comes.

The work is done by a thread that can be left behind, so that whoever asked goes on in bounded time, whatever the
storage does. Called by `place` and `fetching`; decides nothing about how often something is asked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

_T = TypeVar("_T")


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """What `work` returns or raises; TimeoutError if it takes longer, and then it is left behind."""
    answer: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            answer.put(_raising(error))
        else:
            answer.put(lambda: result)

    threading.Thread(target=run, name="unisono-fetch", daemon=True).start()
    try:
        settled = answer.get(timeout=max(seconds, 0.0))
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    return settled()


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def raise_it() -> NoReturn:
        raise error

    return raise_it
