# SPDX-License-Identifier: Apache-2.0
"""The patience of stores: which failures are worth another try, how long it waits, when it stops."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence

import aiohttp
import botocore.exceptions
import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from unisono.checkpoint.retrying import GaveUp, Patience, Verdict, http_status, judge, persist


def s3_error(status: int, code: str) -> botocore.exceptions.ClientError:
    response = {"Error": {"Code": code, "Message": "text"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "PutObject")


class HttpError(Exception):
    """In the shape of those of gcsfs (code) and of Azure (status_code)."""

    def __init__(self, **fields: object) -> None:
        super().__init__("text")
        self.__dict__.update(fields)


class ClientAuthenticationError(Exception):
    pass


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


TABLE = [
    (ConnectionResetError(errno.ECONNRESET, "reset"), Verdict.RETRY),
    (BrokenPipeError(), Verdict.RETRY),
    (TimeoutError(), Verdict.RETRY),
    (socket.gaierror(-3, "Temporary failure in name resolution"), Verdict.RETRY),
    (OSError(errno.EIO, "Input/output error"), Verdict.RETRY),
    (OSError("a driver's words without a number"), Verdict.RETRY),
    (aiohttp.ServerDisconnectedError(), Verdict.RETRY),
    (aiohttp.ClientPayloadError("not enough data"), Verdict.RETRY),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), Verdict.RETRY),
    (botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"), Verdict.RETRY),
    (Exception("what nobody knows"), Verdict.RETRY),
    (FileNotFoundError("x"), Verdict.MISSING),
    (PermissionError("x"), Verdict.DENIED),
    (OSError(errno.ENOSPC, "No space left on device"), Verdict.FULL),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), Verdict.FULL),
    (OSError(errno.EROFS, "Read-only file system"), Verdict.FINAL),
    (ssl.SSLCertVerificationError("self-signed certificate"), Verdict.FINAL),
    (botocore.exceptions.NoCredentialsError(), Verdict.DENIED),
    (botocore.exceptions.ParamValidationError(report="bad bucket"), Verdict.FINAL),
    (ClientAuthenticationError(), Verdict.DENIED),
    (NotImplementedError(), Verdict.FINAL),
    (TypeError("a fault of ours"), Verdict.FINAL),
    (caused(ValueError("dressed up"), ConnectionResetError()), Verdict.RETRY),
    (HttpError(code=503), Verdict.RETRY),
    (HttpError(code="429"), Verdict.RETRY),
    (HttpError(status_code=404), Verdict.MISSING),
    (HttpError(status=403), Verdict.DENIED),
    (HttpError(status=412), Verdict.FINAL),
    (HttpError(code=True), Verdict.RETRY),
    (HttpError(code="SSLError"), Verdict.RETRY),
]


@pytest.mark.parametrize(("error", "verdict"), TABLE, ids=lambda value: getattr(value, "name", repr(value)))
def test_an_exception_is_judged_by_what_it_says(error: Exception, verdict: Verdict) -> None:
    assert judge(error) is verdict


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (500, "InternalError", Verdict.RETRY),
        (503, "SlowDown", Verdict.RETRY),
        (503, "503", Verdict.RETRY),
        (502, "502", Verdict.RETRY),
        (429, "TooManyRequests", Verdict.RETRY),
        (400, "RequestTimeout", Verdict.RETRY),
        (400, "IncompleteBody", Verdict.RETRY),
        (400, "BadDigest", Verdict.RETRY),
        (400, "InvalidArgument", Verdict.FINAL),
        (409, "OperationAborted", Verdict.RETRY),
        (404, "NoSuchKey", Verdict.MISSING),
        (404, "404", Verdict.MISSING),
        (404, "NoSuchUpload", Verdict.RETRY),
        (404, "NoSuchBucket", Verdict.NO_PLACE),
        (403, "SignatureDoesNotMatch", Verdict.DENIED),
        (403, "AccessDenied", Verdict.DENIED),
        (403, "QuotaExceeded", Verdict.FULL),
        (507, "507", Verdict.FULL),
        (501, "NotImplemented", Verdict.FINAL),
        (416, "InvalidRange", Verdict.FINAL),
    ],
)
def test_an_answer_of_s3_is_judged_the_same_raw_and_as_the_driver_translates_it(
    status: int, code: str, verdict: Verdict
) -> None:
    assert judge(s3_error(status, code)) is verdict
    assert judge(translate_boto_error(s3_error(status, code))) is verdict


def test_a_chain_of_causes_that_bites_its_tail_is_judged_too() -> None:
    first, second = Exception("a"), Exception("b")
    first.__cause__, second.__cause__ = second, first
    assert judge(first) is Verdict.RETRY


@pytest.mark.parametrize("value", [None, 200.0, 99, 600, "x", "", True, {}])
def test_what_is_no_http_status_is_not_taken_for_one(value: object) -> None:
    assert http_status(HttpError(code=value)) is None


def test_delays_double_up_to_a_limit_and_are_scattered() -> None:
    patience = Patience(first_delay_s=0.2, longest_delay_s=5)
    assert [patience.delay(attempt, 1.0) for attempt in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert [patience.delay(attempt, 0.0) for attempt in range(3)] == [0.1, 0.2, 0.4]
    assert patience.delay(10_000, 0.0) == 2.5


def test_an_attempt_gets_time_for_its_bytes_and_twice_as_much_each_time() -> None:
    patience = Patience(total_s=60, attempt_s=10, bytes_per_s=1e6, slowest_bytes_per_s=0.25e6)
    assert [patience.limit(attempt, 0) for attempt in range(3)] == [10, 20, 40]
    assert patience.limit(0, 64_000_000) == 74
    assert patience.whole(0) == 60
    assert patience.whole(64_000_000) == 316


class Story:
    """A service that fails as told: each entry is how long an attempt takes, and what comes of it."""

    def __init__(self, entries: Sequence[tuple[float, str | Exception]]) -> None:
        self.now_s, self.entries, self.limits = 0.0, list(entries), list[float]()

    def attempt(self, limit_s: float) -> str:
        self.limits.append(limit_s)
        takes_s, outcome = self.entries.pop(0) if len(self.entries) > 1 else self.entries[0]
        if takes_s > limit_s:
            self.now_s += limit_s
            raise TimeoutError("cut")
        self.now_s += takes_s
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def tell(self, size: int = 0, patience: Patience | None = None) -> str:
        told = patience or Patience()
        return persist(self.attempt, size, told, clock=lambda: self.now_s, sleep=self.sleep, dice=lambda: 1.0)


def test_what_works_is_tried_once() -> None:
    story = Story([(1, "done")])
    assert story.tell() == "done"
    assert story.limits == [10]


def test_a_hiccup_costs_one_short_delay() -> None:
    story = Story([(0, ConnectionResetError()), (0, "done")])
    assert story.tell() == "done"
    assert story.now_s == 0.2


def test_a_stalled_attempt_is_cut_and_the_next_one_gets_longer() -> None:
    story = Story([(1e9, "never"), (15, "done")])
    assert story.tell() == "done"
    assert story.limits == [10, 20]
    assert story.now_s == 10 + 0.2 + 15


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), OSError(errno.ENOSPC, "full"), TypeError()])
def test_what_will_not_get_better_is_given_up_at_once(error: Exception) -> None:
    story = Story([(0, error)])
    with pytest.raises(GaveUp) as caught:
        story.tell()
    assert (caught.value.error, caught.value.attempts, story.now_s) == (error, 1, 0)
    assert caught.value.verdict is judge(error)


def test_a_service_that_stalls_for_ever_is_given_up_after_the_whole_time_and_not_later() -> None:
    story = Story([(1e9, "never")])
    with pytest.raises(GaveUp) as caught:
        story.tell()
    assert story.limits == pytest.approx([10, 20, 60 - 30.6])
    assert caught.value.attempts == 3
    assert story.now_s == pytest.approx(60)


@given(
    takes_s=st.lists(st.floats(0, 100), min_size=1, max_size=8),
    size=st.integers(0, 10**9),
    total_s=st.floats(0.5, 100),
    attempt_s=st.floats(0.1, 50),
)
def test_however_it_fails_the_time_is_bounded(
    takes_s: list[float], size: int, total_s: float, attempt_s: float
) -> None:
    patience = Patience(total_s=total_s, attempt_s=attempt_s)
    story = Story([(seconds, ConnectionResetError()) for seconds in takes_s])
    if sum(takes_s) == 0:
        story.entries.append((0.001, ConnectionResetError()))
    with pytest.raises(GaveUp):
        story.tell(size, patience)
    assert story.now_s <= patience.whole(size) + 1e-6
    assert all(limit > 0 for limit in story.limits)


def test_the_dice_of_the_script_are_not_touched() -> None:
    import random

    before = random.getstate()
    with pytest.raises(GaveUp):
        persist(Story([(0, FileNotFoundError())]).attempt, 0, Patience())
    assert random.getstate() == before
