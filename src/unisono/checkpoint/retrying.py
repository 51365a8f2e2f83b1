# SPDX-License-Identifier: Apache-2.0
"""When to try again, how long to wait, when to stop: the patience of a store that is reached over a network.

`judge` reads an exception of any fsspec driver without importing the driver: from its HTTP status, its error code, its
errno and its type, through the chain of causes. `Patience` is arithmetic. `persist` is the only part that waits, and
its clock, sleep and dice are arguments. Called by `fsspec_store`; knows nothing of objects or URLs.
"""

from __future__ import annotations

import errno
import random
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

# The dice of the delays: never those of the script, whose state belongs to the run's bits.
_dice = random.SystemRandom()


class Verdict(Enum):
    """What an exception means for the one who may try again."""

    RETRY = "worth another try"
    MISSING = "there is no such object"
    NO_PLACE = "the bucket or container itself does not exist"
    DENIED = "credentials or permissions"
    FULL = "no space left"
    FINAL = "will not get better"


_CODES = {  # error codes of the S3 protocol that say more than the status they come with
    "NoSuchBucket": Verdict.NO_PLACE,
    "NoSuchUpload": Verdict.RETRY,  # a multipart upload that was cleaned away under us
    "RequestTimeout": Verdict.RETRY,
    "IncompleteBody": Verdict.RETRY,
    "BadDigest": Verdict.RETRY,
    "XAmzContentSHA256Mismatch": Verdict.RETRY,
    "OperationAborted": Verdict.RETRY,
    "SlowDown": Verdict.RETRY,
    "QuotaExceeded": Verdict.FULL,
    "XMinioStorageFull": Verdict.FULL,
}
_STATUSES = {
    401: Verdict.DENIED,
    403: Verdict.DENIED,
    404: Verdict.MISSING,
    408: Verdict.RETRY,
    425: Verdict.RETRY,
    429: Verdict.RETRY,
    501: Verdict.FINAL,
    507: Verdict.FULL,
}
_NUMBERS = {
    errno.ENOSPC: Verdict.FULL,
    errno.EDQUOT: Verdict.FULL,
    errno.EACCES: Verdict.DENIED,
    errno.EPERM: Verdict.DENIED,
    errno.EROFS: Verdict.FINAL,
    errno.EINVAL: Verdict.FINAL,
    errno.ENAMETOOLONG: Verdict.FINAL,
    errno.ENOTDIR: Verdict.FINAL,
    errno.EISDIR: Verdict.FINAL,
    errno.ENOSYS: Verdict.FINAL,
    errno.ENOTSUP: Verdict.FINAL,
}
_NAMES = {  # of exception classes in packages that may not be installed
    "NoCredentialsError": Verdict.DENIED,
    "PartialCredentialsError": Verdict.DENIED,
    "CredentialRetrievalError": Verdict.DENIED,
    "TokenRetrievalError": Verdict.DENIED,
    "DefaultCredentialsError": Verdict.DENIED,
    "ClientAuthenticationError": Verdict.DENIED,
    "ResourceNotFoundError": Verdict.MISSING,
    "ProfileNotFound": Verdict.FINAL,
    "ConfigParseError": Verdict.FINAL,
    "ParamValidationError": Verdict.FINAL,
}
_OUR_FAULT = (ValueError, TypeError, AttributeError, LookupError, NotImplementedError, AssertionError, ImportError)


def judge(error: BaseException) -> Verdict:
    """What the most telling exception in its chain says; what nobody knows is worth another try."""
    chain = list(_chain(error))
    for reading in (_by_code, _by_status, _by_type):
        for link in chain:
            verdict = reading(link)
            if verdict is not None:
                return verdict
    return Verdict.RETRY


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It and its causes; not what merely happened to be handled at the time."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _by_code(error: BaseException) -> Verdict | None:
    return _CODES.get(str(_answer(error, "Error").get("Code")))


def _by_status(error: BaseException) -> Verdict | None:
    status = http_status(error)
    if status is None or status < 400:
        return None
    return _STATUSES.get(status) or (Verdict.RETRY if status >= 500 else Verdict.FINAL)


def _by_type(error: BaseException) -> Verdict | None:
    for kind in type(error).__mro__:
        if kind.__name__ in _NAMES:
            return _NAMES[kind.__name__]
    if isinstance(error, FileNotFoundError):
        return Verdict.MISSING
    if isinstance(error, PermissionError):
        return Verdict.DENIED
    if isinstance(error, ssl.SSLCertVerificationError):
        return Verdict.FINAL
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return _NUMBERS[error.errno]
    # Drivers also dress network failures up as ValueError and the like: those have a cause that tells.
    return Verdict.FINAL if isinstance(error, _OUR_FAULT) and error.__cause__ is None else None


def http_status(error: BaseException) -> int | None:
    """Where botocore, aiohttp, azure and gcsfs keep it, in that order."""
    candidates = [_answer(error, "ResponseMetadata").get("HTTPStatusCode")]
    candidates += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    for value in candidates:
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
            return value
    return None


def _answer(error: BaseException, part: str) -> dict[str, Any]:
    response = getattr(error, "response", None)
    found = response.get(part) if isinstance(response, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Patience:
    """How long an operation on `size` bytes may take: a fixed part, and one for the bytes on a slow line."""

    total_s: float = 60.0
    attempt_s: float = 10.0  # for the first attempt; each further one gets twice as long as the one before
    bytes_per_s: float = 1e6  # an attempt that is slower than this is taken for stalled, at first
    slowest_bytes_per_s: float = 0.25e6
    first_delay_s: float = 0.2
    longest_delay_s: float = 5.0

    def whole(self, size: int) -> float:
        """Seconds until it is given up."""
        return self.total_s + size / self.slowest_bytes_per_s

    def limit(self, attempt: int, size: int) -> float:
        """Seconds after which attempt 0, 1, ... is cut."""
        return float((self.attempt_s + size / self.bytes_per_s) * 2 ** min(attempt, 20))

    def delay(self, attempt: int, dice: float) -> float:
        """Seconds between attempt and the next. `dice` in [0, 1): workers that failed together come back apart."""
        longest = min(self.longest_delay_s, self.first_delay_s * 2 ** min(attempt, 20))
        return float(longest * (0.5 + 0.5 * dice))


class GaveUp(Exception):
    """The last failure (`__cause__`, and `error`), what it means, and what was tried before."""

    def __init__(self, error: Exception, verdict: Verdict, attempts: int, elapsed_s: float) -> None:
        super().__init__(str(error))
        self.error, self.verdict, self.attempts, self.elapsed_s = error, verdict, attempts, elapsed_s


def persist(
    operation: Callable[[float], T],
    size: int,
    patience: Patience,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    dice: Callable[[], float] = _dice.random,
) -> T:
    """The result of `operation`, which is told in how many seconds it must raise TimeoutError. Raises GaveUp."""
    begun_s = clock()
    attempt = 0
    while True:
        left_s = begun_s + patience.whole(size) - clock()
        try:
            return operation(min(patience.limit(attempt, size), left_s))
        except Exception as error:
            verdict, now_s = judge(error), clock()
            delay_s = patience.delay(attempt, dice())
            attempt += 1
            # No attempt is begun that would be cut before it could succeed.
            hopeless = now_s + delay_s + patience.first_delay_s > begun_s + patience.whole(size)
            if verdict is not Verdict.RETRY or hopeless:
                raise GaveUp(error, verdict, attempt, now_s - begun_s) from error
            sleep(delay_s)
