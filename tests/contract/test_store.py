# SPDX-License-Identifier: Apache-2.0
"""What every place for checkpoints must do, held against a directory, fsspec drivers and a real S3 server.

The same class of tests runs on each; what only a network can do to a store is below it, behind a proxy that fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from labs.faulty_http import Faults, FaultyHttp, faulty_http
from labs.s3_server import SECRET_KEY, S3Server, s3_server
from unisono.checkpoint.fsspec_store import FsspecStore
from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.retrying import Patience
from unisono.checkpoint.store import Entry, Store, StoreFailed, StoreMissing, free_bytes, open_store, prove_writable
from unisono.core.errors import StoreDenied

KINDS = ("directory", "file", "memory", "s3", "s3 with 5 % errors")
SHORT = Patience(total_s=4, attempt_s=1, first_delay_s=0.05)
SLACK_S = 5.0  # for a machine that is busy with other things
VERY_SHORT = Patience(total_s=1, attempt_s=1, first_delay_s=0.05)

BAD_KEYS = (
    "", "/", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "a/", "./a", ".hidden", "a/.b", "a\0b", "a\nb", "a b",
    "ä", "a\\b", "a?b", "a#b", "a%2e", "~", "~root", "*", "a:b", "x" * 201, "a/" * 500 + "a",
)  # fmt: skip

RANGES = (
    (0, None, b"0123456789"), (0, 4, b"0123"), (3, 4, b"3456"), (3, None, b"3456789"), (8, 100, b"89"),
    (0, 100, b"0123456789"), (10, 5, b""), (500, 5, b""), (500, None, b""), (5, 0, b""),
)  # fmt: skip


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind, name = str(request.param), uuid.uuid4().hex
    if kind == "directory":
        yield open_store(str(tmp_path / "checkpoints"))
    elif kind == "file":
        yield FsspecStore(f"file://{tmp_path}/checkpoints")
    elif kind == "memory":
        yield open_store(f"memory://{name}")
    else:
        server: S3Server = request.getfixturevalue("s3")
        share = 0.05 if "errors" in kind else 0.0
        with faulty_http(server.port, Faults(share, seed=5)) as proxy, server.environment(proxy.endpoint * bool(share)):
            yield open_store(server.url(name))


class TestEveryStore:
    def test_an_object_comes_back_as_it_was_put(self, store: Store) -> None:
        data = os.urandom(100_000)
        store.put("chunks/ab/abcd.safetensors", data)
        assert store.get("chunks/ab/abcd.safetensors") == data

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.get("empty", 0, 10) == b""
        assert store.list() == [Entry("empty", 0)]

    def test_any_buffer_can_be_put(self, store: Store) -> None:
        for kind in (bytes, bytearray, memoryview):
            store.put(kind.__name__, kind(b"0123456789"))
            assert store.get(kind.__name__) == b"0123456789"

    def test_several_buffers_become_one_object(self, store: Store) -> None:
        numbers = memoryview(bytearray(b"\x01\x00\x02\x00")).cast("h")  # as of a tensor: not bytes, but two int16
        store.put("one", [b"head", numbers, b"", memoryview(b"tail")])
        assert store.get("one") == b"head\x01\x00\x02\x00tail"

    def test_a_range_is_read_as_far_as_the_object_goes(self, store: Store) -> None:
        store.put("digits", b"0123456789")
        for start, length, found in RANGES:
            assert store.get("digits", start, length) == found, (start, length)

    def test_a_range_before_the_beginning_is_refused(self, store: Store) -> None:
        store.put("digits", b"0123456789")
        for start, length in ((-1, None), (0, -1)):
            with pytest.raises(ValueError, match="no such range"):
                store.get("digits", start, length)

    def test_a_missing_object_is_missing_and_named(self, store: Store) -> None:
        store.put("chunks/other", b"1")
        for key in ("chunks/none.safetensors", "nowhere/none.safetensors"):
            for length in (None, 0, 5):
                with pytest.raises(StoreMissing, match=key) as caught:
                    store.get(key, 0, length)
                assert caught.value.key == key

    def test_a_put_replaces_what_was_there(self, store: Store) -> None:
        store.put("one", b"a long first version")
        store.put("one", b"second")
        assert store.get("one") == b"second"
        assert store.list() == [Entry("one", 6)]

    def test_a_commit_is_seen_by_another_store_at_once(self, store: Store) -> None:
        other = open_store(store.url) if isinstance(store, LocalStore) else FsspecStore(store.url)
        assert other.list("steps") == []
        store.put("chunks/ab/abcd", b"12")
        store.commit("steps/000000000005.json", b"{}")
        assert other.list("steps") == [Entry("steps/000000000005.json", 2)]
        assert other.get("steps/000000000005.json") == b"{}"
        assert other.get("chunks/ab/abcd") == b"12"

    def test_a_listing_has_every_object_of_a_folder_in_order_and_nothing_else(self, store: Store) -> None:
        assert store.list() == []
        assert store.list("chunks") == []
        for key in ("steps/2.json", "chunks/ab/2", "chunks/ab/1", "chunks/cd/3", "chunks-of-others/x", "steps/10.json"):
            store.put(key, key.encode())
        chunks = ["chunks/ab/1", "chunks/ab/2", "chunks/cd/3"]
        assert store.list("chunks") == store.list("chunks/") == [Entry(key, len(key)) for key in chunks]
        assert [entry.key for entry in store.list("chunks/ab")] == chunks[:2]
        assert [entry.key for entry in store.list()] == sorted(
            [*chunks, "chunks-of-others/x", "steps/2.json", "steps/10.json"]
        )

    def test_a_deleted_object_is_gone_and_may_be_deleted_again(self, store: Store) -> None:
        store.put("parts/5-0/2.json", b"{}")
        store.put("parts/5-0/3.json", b"{}")
        for _ in range(2):
            store.delete("parts/5-0/2.json")
        assert [entry.key for entry in store.list()] == ["parts/5-0/3.json"]
        store.delete("parts/5-0/3.json")
        assert store.list("parts") == []
        store.put("parts/5-0/2.json", b"again")
        assert store.get("parts/5-0/2.json") == b"again"

    def test_a_key_that_could_lead_elsewhere_is_refused(self, store: Store) -> None:
        for key in BAD_KEYS:
            for operation in (
                store.get,
                store.delete,
                lambda name: store.put(name, b""),
                lambda name: store.commit(name, b""),
            ):
                with pytest.raises(StoreFailed, match="cannot be the name of an object"):
                    operation(key)
        for folder in ("..", "a/..", "/etc", "a//b", "../"):
            with pytest.raises(StoreFailed, match="cannot be the name of an object"):
                store.list(folder)

    def test_threads_may_use_it_at_once(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(5):
                    key, data = f"chunks/{turn}/{number}", bytes([number]) * (1000 + turn)
                    store.put(key, data)
                    assert store.get(key) == data
                    store.put("chunks/shared", b"the same")
                    if turn % 2:
                        store.delete(key)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.get("chunks/shared") == b"the same"
        assert len(store.list("chunks")) == 6 * 3 + 1

    def test_a_large_object_survives_the_trip(self, store: Store) -> None:
        data = os.urandom(1 << 20) * 40  # in parts, where a driver sends and fetches in parts
        store.put("large", [data[:100], memoryview(data)[100:]])
        assert store.list() == [Entry("large", len(data))]
        assert store.get("large") == data
        assert store.get("large", 30 << 20, 5 << 20) == data[30 << 20 : 35 << 20]
        assert store.get("large", 1 << 20, 1 << 30) == data[1 << 20 :]

    def test_a_store_proves_that_it_can_be_written_and_leaves_nothing(self, store: Store) -> None:
        prove_writable(store)
        assert store.list() == []

    def test_free_space_is_known_or_said_to_be_unknown(self, store: Store) -> None:
        free = free_bytes(store)
        assert free is None or free > 0
        assert (free is None) == isinstance(store, FsspecStore)


@contextlib.contextmanager
def behind(s3: S3Server, faults: Faults, patience: Patience = SHORT) -> Iterator[tuple[FsspecStore, FaultyHttp]]:
    with faulty_http(s3.port, faults) as proxy, s3.environment(proxy.endpoint):
        yield FsspecStore(s3.url(uuid.uuid4().hex), patience), proxy


class TestOverABadNetwork:
    def test_five_errors_in_a_hundred_requests_are_not_even_noticed(self, s3: S3Server) -> None:
        with behind(s3, Faults(share=0.05, seed=7), Patience()) as (store, proxy):
            for number in range(60):
                store.put(f"chunks/{number}", bytes([number]) * 1000)
            for number in range(60):
                assert store.get(f"chunks/{number}", 0, 1000) == bytes([number]) * 1000
            store.commit("steps/1.json", b"{}")
            assert [entry.key for entry in store.list("steps")] == ["steps/1.json"]
            assert proxy.injected.total() >= 5

    @pytest.mark.parametrize("kind", ["500", "503", "reset", "late reset"])
    def test_every_second_request_may_fail(self, s3: S3Server, kind: str) -> None:
        with behind(s3, Faults(share=0.5, seed=3, kinds=(kind,)), Patience(first_delay_s=0.02)) as (store, proxy):
            for number in range(5):
                store.put(f"chunks/{number}", bytes([number]) * 1000)
            assert [store.get(f"chunks/{number}") for number in range(5)] == [bytes([n]) * 1000 for n in range(5)]
            assert len(store.list("chunks")) == 5
            assert proxy.injected[kind] >= 3

    def test_one_stalled_upload_is_cut_and_sent_again(self, s3: S3Server) -> None:
        with behind(s3, Faults(stall="^PUT .*/chunks/"), Patience(attempt_s=1)) as (store, proxy):
            begun_s = time.monotonic()
            store.put("chunks/a", b"x" * 40_000)
            assert time.monotonic() - begun_s > 1
            assert proxy.injected["stall"] == 1
            assert proxy.hung_up.wait(5), "the stalled upload was left open"
            assert store.get("chunks/a") == b"x" * 40_000

    def test_an_upload_that_always_stalls_is_given_up_in_time_and_named(self, s3: S3Server) -> None:
        with behind(s3, Faults(stall="^PUT .*/chunks/", stalls=1000), SHORT) as (store, _):
            FsspecStore(store.url).put("steps/1.json", b"{}")
            begun_s = time.monotonic()
            with pytest.raises(StoreFailed, match="cannot write chunks/a in s3://checkpoints/") as caught:
                store.put("chunks/a", b"x" * 300_000)
            assert time.monotonic() - begun_s < SHORT.whole(300_000) + SLACK_S
            assert "no end after" in caught.value.cause
            assert caught.value.key == "chunks/a"
            assert [entry.key for entry in FsspecStore(store.url).list()] == ["steps/1.json"]

    def test_a_part_that_stalls_leaves_no_half_of_a_large_upload(self, s3: S3Server) -> None:
        patience = Patience(total_s=30, attempt_s=1, bytes_per_s=20e6, slowest_bytes_per_s=10e6)
        data = os.urandom(1 << 20) * 40
        with behind(s3, Faults(stall="^PUT .*partNumber=2"), patience) as (store, proxy):
            store.put("chunks/large", data)
            assert proxy.injected["stall"] == 1
            assert store.get("chunks/large") == data
        uploads = s3.client().list_multipart_uploads("checkpoints")
        assert uploads == []

    def test_a_service_that_is_down_is_named_in_bounded_time(self, s3: S3Server) -> None:
        with faulty_http(s3.port) as proxy:
            dead = proxy.endpoint
        with s3.environment(dead):
            store = FsspecStore(s3.url("down"), VERY_SHORT)
            for operation in (
                lambda: store.put("a", b"1"),
                lambda: store.get("a"),
                store.list,
                lambda: store.delete("a"),
            ):
                begun_s = time.monotonic()
                with pytest.raises(StoreFailed, match="s3://checkpoints/down") as caught:
                    operation()
                assert time.monotonic() - begun_s < VERY_SHORT.whole(1) + SLACK_S
                assert "can be reached" in caught.value.do

    def test_a_listing_that_fails_is_never_an_empty_one(self, s3: S3Server) -> None:
        with (
            behind(s3, Faults(refuse="^GET .*list-type"), VERY_SHORT) as (store, _),
            pytest.raises(StoreFailed, match="cannot list"),
        ):
            store.list("steps")


class TestS3:
    def test_a_wrong_secret_is_said_at_once_and_never_shown(self, s3: S3Server) -> None:
        with s3.environment(secret="a-wrong-secret"):
            store = FsspecStore(s3.url("x"))
            for operation in (lambda: store.put("a", b"1"), lambda: store.get("a"), store.list):
                begun_s = time.monotonic()
                with pytest.raises(StoreDenied, match="AWS_SECRET_ACCESS_KEY") as caught:
                    operation()
                assert time.monotonic() - begun_s < 20  # of the 60 that it may take
                assert SECRET_KEY not in str(caught.value)
                assert "a-wrong-secret" not in str(caught.value)

    def test_a_bucket_that_does_not_exist_is_no_empty_store(self, s3: S3Server) -> None:
        with s3.environment():
            store = FsspecStore("s3://no-such-bucket/run")
            reads = (lambda: store.get("a"), lambda: store.get("a", 0, 5))
            for operation in (lambda: store.put("a", b"1"), store.list, *reads):
                with pytest.raises(StoreFailed, match="no-such-bucket") as caught:
                    operation()
                assert "create no-such-bucket first" in caught.value.do

    def test_a_listing_does_not_ask_folder_by_folder(self, s3: S3Server) -> None:
        with behind(s3, Faults(), Patience()) as (store, proxy):
            for number in range(12):
                store.put(f"chunks/{number}/x", b"1")
            proxy.requests.clear()
            assert len(store.list("chunks")) == 12
            assert len(proxy.requests) < 12

    def test_a_forked_child_gets_a_driver_of_its_own(self, s3: S3Server) -> None:
        with s3.environment():
            store = FsspecStore(s3.url(uuid.uuid4().hex))
            store.put("parent", b"1")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    store.put("child", store.get("parent"))
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert [entry.key for entry in store.list()] == ["child", "parent"]
