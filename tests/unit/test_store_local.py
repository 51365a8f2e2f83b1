# SPDX-License-Identifier: Apache-2.0
"""A directory as a store: killed writers, full and read-only disks, links that lead out, and what reaches the disk."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.store import Entry, StoreFailed, StoreFull, StoreMissing, free_bytes
from unisono.core.errors import StoreDenied

TIMEOUT_S = 60

WRITER = """
import sys
from unisono.checkpoint.local_store import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
for number in range(10**9):
    store.put(f"chunks/{number % 7}/{number % 50}", bytes([number % 256]) * 3_000_000)
    store.commit(f"steps/{number % 5}.json", b"%d" % number * 100)
"""


def scratch_files(root: Path) -> list[Path]:
    return sorted(root.rglob(".unisono-*"))


def test_a_writer_that_is_killed_leaves_whole_objects_and_nothing_that_the_next_one_does_not_sweep(
    tmp_path: Path,
) -> None:
    dice, kills, left_behind = random.Random(11), 0, 0
    while kills < 6 or (left_behind < 3 and kills < 60):  # a kill between two writes shows nothing
        kills += 1
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(dice.uniform(0.01, 0.15))
            writer.send_signal(signal.SIGKILL)
        left_behind += len(scratch_files(tmp_path))
        store = LocalStore(tmp_path)
        for entry in store.list():
            data = store.get(entry.key)
            assert len(data) == entry.bytes
            assert len(set(data)) == 1 if entry.key.startswith("chunks") else data == data[: len(data) // 100] * 100
        store.put("chunks/after", b"1")
        assert scratch_files(tmp_path) == []
    assert left_behind >= 3


def test_the_scratch_file_of_a_living_writer_is_never_swept(tmp_path: Path) -> None:
    writer, sweeper = LocalStore(tmp_path), LocalStore(tmp_path)
    scratch, descriptor = writer._open_scratch(tmp_path)
    assert sweeper.sweep() == 0
    assert scratch.exists()
    os.close(descriptor)
    assert sweeper.sweep() == 1
    assert not scratch.exists()


def test_a_scratch_file_of_another_host_is_swept_only_when_it_is_old(tmp_path: Path) -> None:
    scratch = tmp_path / ".unisono-0000beef-abc.scratch"
    scratch.write_bytes(b"half")
    assert LocalStore(tmp_path).sweep() == 0
    os.utime(scratch, (0, 0))
    assert LocalStore(tmp_path).sweep() == 1


def test_reading_and_listing_sweep_nothing_and_do_not_show_scratch_files(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("one", b"1")
    _, descriptor = LocalStore(tmp_path)._open_scratch(tmp_path)
    os.close(descriptor)
    (tmp_path / "notes of a user.txt").write_text("not ours")
    store = LocalStore(tmp_path)
    assert store.list() == [Entry("one", 1)]
    assert store.get("one") == b"1"
    assert len(scratch_files(tmp_path)) == 1
    store.put("two", b"2")
    assert scratch_files(tmp_path) == []
    assert (tmp_path / "notes of a user.txt").exists()


def test_a_folder_that_is_emptied_under_a_write_does_not_fail_it(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        store = LocalStore(tmp_path)
        try:
            for _ in range(60):
                store.put(f"parts/5-0/{name}", b"{}")
                store.delete(f"parts/5-0/{name}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []


def test_a_put_brings_bytes_then_name_then_folders_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def watched_sync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        done.append(f"rename to {target}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    root = tmp_path.resolve() / "checkpoints"
    store = LocalStore(root)
    store.put("chunks/ab/one", b"1")
    rename = done.index(f"rename to {root}/chunks/ab/one")
    assert ".unisono-" in done[rename - 1]
    assert done[rename + 1] == f"{root}/chunks/ab"
    assert {f"{root}/chunks", str(root), str(root.parent)} <= set(done[:rename])
    done.clear()
    store.put("chunks/ab/two", b"2")  # the folders above are durable by now
    assert [".unisono-" in done[0], done[1:]] == [True, [f"rename to {root}/chunks/ab/two", f"{root}/chunks/ab"]]


def test_a_failed_put_leaves_the_old_object_and_no_scratch_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("one", b"old")
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreFailed, match="cannot write taken in") as caught:
        store.put("taken", b"new")
    assert "a file is where a folder should be, or the reverse" in caught.value.do
    with pytest.raises(StoreFailed, match="cannot write one/below in"):
        store.put("one/below", b"new")
    assert store.get("one") == b"old"
    assert scratch_files(tmp_path) == []


def on_a_disk(options: str, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program with a file system of its own on ./small; nobody else sees it."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mkdir -p small && mount -t tmpfs -o {options} tmpfs small && exec "$@"'
    command = ["unshare", "--mount", *as_root, "sh", "-c", mount, "sh", sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_full_disk_names_the_object_the_space_and_the_cure_and_keeps_what_was_there(tmp_path: Path) -> None:
    program = """
from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.store import StoreFull, free_bytes
store = LocalStore("small/checkpoints")
assert 400_000 < free_bytes(store) <= 512 << 10, free_bytes(store)
store.put("steps/1.json", b"{}")
free = free_bytes(store)
try:
    store.put("chunks/ab/big", b"x" * 2_000_000)
except StoreFull as error:
    print(error)
    assert error.key == "chunks/ab/big"
assert [entry.key for entry in store.list()] == ["steps/1.json"]
store.put("chunks/ab/small", b"x" * 300_000)  # the scratch file gave its space back
"""
    done = on_a_disk("size=512k", program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "UNI-3012  cannot write chunks/ab/big in" in done.stdout
    assert "No space left on device; 2.0 MB to write, 0." in done.stdout
    assert "keep fewer checkpoints" in done.stdout


def test_a_read_only_disk_is_denied_for_writing_and_fine_for_reading(tmp_path: Path) -> None:
    program = """
import subprocess
from unisono.checkpoint.local_store import LocalStore
from unisono.checkpoint.store import StoreFailed
LocalStore("small").put("one", b"1")
subprocess.run(["mount", "-o", "remount,ro", "small"], check=True)
store = LocalStore("small")
assert store.get("one") == b"1" and len(store.list()) == 1
for operation in (lambda: store.put("two", b""), lambda: store.delete("one")):
    try:
        operation()
    except StoreFailed as error:
        print(error)
"""
    done = on_a_disk("size=512k", program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "UNI-3013  cannot write two in" in done.stdout
    assert "UNI-3013  cannot delete one in" in done.stdout
    assert done.stdout.count("Read-only file system") == 2


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, StoreFull, "free some space"),
        (errno.EDQUOT, StoreFull, "raise the quota, free some space"),
        (errno.EIO, StoreFailed, "look at that disk"),
        (errno.EACCES, StoreDenied, "give this user the right"),
        (errno.ESTALE, StoreFailed, "look at that disk"),
    ],
)
def test_each_failure_of_the_system_has_its_cure(
    tmp_path: Path, number: int, kind: type[StoreFailed], says: str
) -> None:
    error = LocalStore(tmp_path)._error(OSError(number, os.strerror(number)), "write", "chunks/x", 5_000_000)
    assert type(error) is kind
    assert error.key == "chunks/x"
    assert os.strerror(number) in error.what
    assert "chunks/x" in error.what
    assert error.do.startswith(says)
    assert ("5.0 MB to write" in error.what) == (kind is StoreFull)


def test_a_link_that_leads_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    outside, store = tmp_path / "outside", LocalStore(tmp_path / "store")
    outside.mkdir()
    (outside / "precious").write_bytes(b"keep me")
    store.put("here", b"1")
    (store.root / "chunks").symlink_to(outside)
    (store.root / "stolen").symlink_to(outside / "precious")
    operations = (store.get, store.delete, lambda key: store.put(key, b"x"), lambda key: store.list(key))
    for key in ("chunks/precious", "stolen"):
        for operation in operations:
            with pytest.raises(StoreFailed, match="leads out of the checkpoint store"):
                operation(key)
    assert store.list() == [Entry("here", 1)]
    assert (outside / "precious").read_bytes() == b"keep me"
    assert [path.name for path in outside.iterdir()] == ["precious"]


def test_the_store_itself_may_be_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("large-disk")
    store = LocalStore(tmp_path / "checkpoints")
    store.put("a/b", b"1")
    assert store.list() == [Entry("a/b", 1)]
    assert (tmp_path / "large-disk/a/b").read_bytes() == b"1"


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "b")
    assert store.list() == []
    with pytest.raises(StoreMissing):
        store.get("x")
    store.delete("x")
    assert (free_bytes(store) or 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    for key in ("a", "a/b/c"):
        with pytest.raises(StoreMissing):
            store.get(key)


def test_a_relative_path_still_means_the_same_place_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("runs/x")
    monkeypatch.chdir("/")
    store.put("one", b"1")
    assert (tmp_path / "runs/x/one").exists()
