# SPDX-License-Identifier: Apache-2.0
"""From what a user writes to a store: paths, URLs, missing drivers, and secrets that no message shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unisono.checkpoint.fsspec_store import FsspecStore, masked
from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.retrying import GaveUp, Verdict
from unisono.checkpoint.store import StoreFailed, open_store
from unisono.core.errors import StoreDenied, StoreFull, UsageError


@pytest.mark.parametrize(
    ("address", "root"),
    [
        ("/data/checkpoints", "/data/checkpoints"),
        ("/data/checkpoints/", "/data/checkpoints"),
        ("file:///data/checkpoints", "/data/checkpoints"),
        ("local:///data/checkpoints", "/data/checkpoints"),
        ("/data/a:b", "/data/a:b"),
    ],
)
def test_a_path_and_a_file_url_are_a_directory(address: str, root: str) -> None:
    store = open_store(address)
    assert isinstance(store, LocalStore)
    assert store.url == root


def test_a_relative_path_and_one_from_home_are_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert open_store("runs/x").url == str(tmp_path / "runs/x")
    assert open_store("~/x").url == "/home/someone/x"


def test_any_other_url_goes_to_its_driver() -> None:
    store = open_store("memory://run")
    assert isinstance(store, FsspecStore)
    assert store.url == "memory://run"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "an empty address"),
        ("  ", "an empty address"),
        ("memroy://x", "did you mean 'memory'?"),
        ("s4://bucket/x", "s4://"),
        ("banana-split://x", "use a directory, s3://"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("simplecache::s3://bucket/x", "chain of URLs"),
        ("gs://bucket/x", 'pip install "unisono[gcs]"'),
        ("az://container/x", 'pip install "unisono[azure]"'),
        ("s3://AKIA:geheim@bucket/x", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_an_address_that_cannot_work_says_what_would(address: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(address)
    assert says in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_without_the_driver_for_s3_the_package_to_install_is_named() -> None:
    program = """
import sys
sys.modules["s3fs"] = None  # as if it were not installed
from unisono.checkpoint.store import open_store
try:
    open_store("s3://bucket/run")
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "UNI-1001  s3://bucket/run needs a package that is not installed" in done.stdout, done.stderr
    assert 'pip install "unisono[s3]"' in done.stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:geheim@host/x", "sftp://***@host/x"),
        ("sftp://me:ge@heim@host/x", "sftp://***@host/x"),
        ("cannot reach https://geheim@host:80/a, twice", "cannot reach https://***@host:80/a, twice"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("abfs://me:geheim@account.dfs.core.windows.net/x", "abfs://***@account.dfs.core.windows.net/x"),
        ("http://h/x?X-Amz-Signature=geheim&b=1", "http://h/x?X-Amz-Signature=***&b=1"),
        ("http://h/x?sv=1&sig=geheim", "http://h/x?sv=1&sig=***"),
        ("AccountName=a;AccountKey=geheim==;Suffix=b", "AccountName=a;AccountKey=***;Suffix=b"),
        ('{"aws_secret_access_key": "geheim", "a": 1}', '{"aws_secret_access_key": "***", "a": 1}'),
        ("nothing to hide at 12:30, user@example.org", "nothing to hide at 12:30, user@example.org"),
    ],
)
def test_secrets_in_urls_and_messages_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("verdict", "kind", "says"),
    [
        (Verdict.RETRY, StoreFailed, "check that run can be reached"),
        (Verdict.DENIED, StoreDenied, "check the credentials"),
        (Verdict.FULL, StoreFull, "keep fewer checkpoints"),
        (Verdict.NO_PLACE, StoreFailed, "create run first"),
        (Verdict.FINAL, StoreFailed, "correct the address"),
    ],
)
def test_what_is_given_up_names_object_place_cause_and_cure(
    verdict: Verdict, kind: type[StoreFailed], says: str
) -> None:
    end = GaveUp(OSError("broken at memory://a:geheim@run"), verdict, attempts=4, elapsed_s=12.3)
    error = FsspecStore("memory://run")._error(end, "write", "chunks/x")
    assert type(error) is kind
    assert error.what == "cannot write chunks/x in memory://run"
    assert error.cause == "OSError: broken at memory://***@run (4 attempts in 12 s)"
    assert says in error.do
    assert error.key == "chunks/x"
