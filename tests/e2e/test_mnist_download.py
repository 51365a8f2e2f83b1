# SPDX-License-Identifier: Apache-2.0
"""Fetching MNIST from a real HTTP server on this machine: the good case, and each way in which it goes wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pty
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.core.errors import SetupError
from unisono.data import digits, mnist

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
SHAPES = {
    IMAGES: (20, 28, 28),
    LABELS: (20,),
    "t10k-images-idx3-ubyte.gz": (10, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10,),
}
WAIT_S = 60


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


class Site:
    """The four files on 127.0.0.1, what was asked of them, and the faults that a test asks for."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.arrays = {name: rng.integers(0, 256 if len(s) == 3 else 10, s) for name, s in SHAPES.items()}
        self.files = {name: gzip.compress(idx(array), mtime=0) for name, array in self.arrays.items()}
        self.asked: Counter[str] = Counter()
        self.cut: set[tuple[str, int]] = set()  # (file, how often asked): the answer ends half-way
        self.busy: set[tuple[str, int]] = set()  # answered with 503
        self.before_answer: Callable[[str, int], None] = lambda _name, _time: None
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/mnist/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def checksums(self) -> dict[str, str]:
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.files.items()}

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/mnist/")
                with site._lock:
                    site.asked[name] += 1
                    time = site.asked[name]
                site.before_answer(name, time)
                if name not in site.files or (name, time) in site.busy:
                    self.send_error(404 if name not in site.files else 503)
                    return
                content = site.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if (name, time) in site.cut else content)

            def log_message(self, *_: object) -> None:
                return None

        return Handler


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()
    yield site
    site.close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"} if folder.exists() else set()


def same(one: tuple[torch.utils.data.TensorDataset, ...], other: tuple[torch.utils.data.TensorDataset, ...]) -> bool:
    return all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x.tensors, y.tensors, strict=True)
    )


def test_mnist_is_downloaded_once_and_then_read_without_a_network(
    site: Site, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = mnist(site.url, cache=cache, checksums=site.checksums)
    assert first[0].tensors[1].tolist() == site.arrays[LABELS].tolist()
    assert first[0].tensors[0].shape == (20, 1, 28, 28)
    assert names(cache) == set(SHAPES)
    checksums = site.checksums
    site.close()
    again = mnist(site.url, cache=cache, checksums=checksums, fallback=False)
    assert same(first, again)
    assert capfd.readouterr().err == ""  # no bar where stderr is no terminal


def test_a_cache_that_may_not_be_written_is_enough_when_it_is_full(site: Site, cache: Path) -> None:
    cache.mkdir()
    for name, content in site.files.items():
        (cache / name).write_bytes(content)
    mnist(site.url, cache=cache, checksums=site.checksums)
    assert {path.name for path in cache.iterdir()} == set(SHAPES)  # not even a lock
    assert not site.asked


def test_mnist_and_fashion_have_caches_of_their_own(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mnist(site.url, checksums=site.checksums)
    mnist(site.url, checksums=site.checksums, fashion=True)
    for folder in ("mnist", "fashion-mnist"):
        assert names(tmp_path / "unisono" / folder) == set(SHAPES)


def test_files_are_fetched_from_a_file_address_too(site: Site, cache: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name, content in site.files.items():
        (mirror / name).write_bytes(content)
    assert len(mnist(mirror.as_uri(), cache=cache, checksums=site.checksums)[1]) == 10
    assert names(cache) == set(SHAPES)


def test_a_wrong_checksum_is_an_error_with_both_values_and_never_a_fallback(
    site: Site, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = site.checksums
    site.files[LABELS] = gzip.compress(idx(np.zeros(20)), mtime=0)
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, checksums=expected, fallback=True)
    for part in (LABELS, expected[LABELS], site.checksums[LABELS]):
        assert part in str(caught.value)
    assert names(cache) == {IMAGES}  # what was good before stays; the bad file has left nothing
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fashion", [False, True])
def test_the_well_known_checksums_hold_when_none_are_given(site: Site, cache: Path, fashion: bool) -> None:
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, fashion=fashion)
    known = "8d4fb7e6c68d591d4c3dfef9ec88bf0d" if fashion else "f68b3c2dcbeaaa9fbdd348bbdeb94873"
    assert f"expected {known}" in str(caught.value)
    assert hashlib.md5(site.files[IMAGES]).hexdigest() in str(caught.value)


def test_a_file_that_the_mirror_itself_holds_truncated_is_named(site: Site, cache: Path) -> None:
    site.files[IMAGES] = gzip.compress(idx(site.arrays[IMAGES])[:-1])
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, checksums=site.checksums)
    assert str(cache / IMAGES) in str(caught.value)
    assert "promises 15,680 bytes, it holds 15,679" in str(caught.value)


def test_an_answer_that_breaks_off_is_asked_for_again(site: Site, cache: Path) -> None:
    site.cut = {(IMAGES, 2), (LABELS, 1), (LABELS, 2)}
    site.busy = {(IMAGES, 1)}
    assert len(mnist(site.url, cache=cache, checksums=site.checksums, fallback=False)[0]) == 20
    assert site.asked[LABELS] == 3
    assert names(cache) == set(SHAPES)


def test_a_server_that_always_breaks_off_leads_to_the_digits_and_leaves_no_half_file(
    site: Site, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site.cut = {(LABELS, time) for time in range(1, 99)}
    assert same(mnist(site.url, cache=cache, checksums=site.checksums), digits())
    assert names(cache) == {IMAGES}
    assert "bytes" in capfd.readouterr().err


def test_without_a_server_one_message_says_why_and_the_digits_are_used(
    site: Site, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site.close()
    assert same(mnist(site.url, cache=cache, checksums=site.checksums), digits())
    told = capfd.readouterr().err
    assert told.count("unisono:") == 1
    for part in (
        "MNIST could not be fetched",
        "scikit-learn",
        site.url,
        "Connection refused",
        str(cache),
        "fallback=False",
    ):
        assert part in told


def test_without_a_server_and_without_fallback_it_is_an_error(site: Site, cache: Path) -> None:
    site.close()
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, checksums=site.checksums, fashion=True, fallback=False)
    for part in ("Fashion-MNIST could not be fetched", "Connection refused", "check the network"):
        assert part in str(caught.value)


def test_without_a_server_and_without_scikit_learn_both_cures_are_named(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.close()
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # how Python itself spells "cannot be imported"
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, checksums=site.checksums)
    assert "check the network" in str(caught.value)
    assert 'pip install "unisono[demo]"' in str(caught.value)


def test_an_address_without_the_file_is_a_mistake_and_not_a_missing_network(site: Site, cache: Path) -> None:
    checksums = site.checksums
    del site.files[LABELS]
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, checksums=checksums, fallback=True)
    assert f"{site.url}{LABELS}: the server answered 404" in str(caught.value)
    assert site.asked[LABELS] == 1


def test_a_half_file_under_the_final_name_is_fetched_anew(site: Site, cache: Path) -> None:
    cache.mkdir()
    (cache / IMAGES).write_bytes(site.files[IMAGES][:100])
    (cache / f"{IMAGES}.part").write_bytes(site.files[IMAGES][:50])
    assert len(mnist(site.url, cache=cache, checksums=site.checksums)[0]) == 20
    assert (cache / IMAGES).read_bytes() == site.files[IMAGES]
    assert names(cache) == set(SHAPES)


def test_a_half_file_that_cannot_be_fetched_anew_is_an_error_and_never_a_fallback(site: Site, cache: Path) -> None:
    cache.mkdir()
    (cache / IMAGES).write_bytes(site.files[IMAGES][:100])
    site.close()
    with pytest.raises(SetupError) as caught:
        mnist(site.url, cache=cache, checksums=site.checksums)
    assert f"{cache / IMAGES} has the wrong checksum" in str(caught.value)


SCRIPT = """
import json, sys
from unisono.data import mnist
mnist(sys.argv[1], cache=sys.argv[2], checksums=json.loads(sys.argv[3]))
"""


def command(site: Site, cache: Path) -> list[str]:
    return [sys.executable, "-c", SCRIPT, site.url, str(cache), json.dumps(site.checksums)]


def test_a_killed_download_leaves_nothing_that_is_mistaken_for_the_file(site: Site, cache: Path) -> None:
    half_way, go_on = threading.Event(), threading.Event()

    def stop_half_way(name: str, time: int) -> None:
        if (name, time) == (LABELS, 1):  # by then the images are there, and the labels' scratch file is open
            half_way.set()
            go_on.wait(WAIT_S)

    site.before_answer = stop_half_way
    with subprocess.Popen(command(site, cache)) as process:
        assert half_way.wait(WAIT_S)
        process.kill()
    go_on.set()
    assert names(cache) == {IMAGES, f"{LABELS}.part"}
    assert len(mnist(site.url, cache=cache, checksums=site.checksums, fallback=False)[0]) == 20
    assert names(cache) == set(SHAPES)


def test_many_who_ask_at_once_download_each_file_once(site: Site, cache: Path) -> None:
    many = 4
    all_have_asked = threading.Barrier(many)

    def wait_for_all(name: str, time: int) -> None:
        if name == IMAGES and time <= many:  # each asks for a first answer before it queues
            all_have_asked.wait(WAIT_S)

    site.before_answer = wait_for_all
    with ThreadPoolExecutor(many) as pool:
        asked = [pool.submit(mnist, site.url, cache=cache, checksums=site.checksums) for _ in range(many)]
        results = [future.result(WAIT_S) for future in asked]
    assert all(same(results[0], other) for other in results[1:])
    assert site.asked == {name: 1 + many * (name == IMAGES) for name in SHAPES}


def test_a_cache_that_cannot_be_written_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SetupError, match="cannot be used") as caught:
        mnist(site.url, cache=tmp_path / "file" / "cache", checksums=site.checksums)
    assert "mnist(cache=" in str(caught.value)


def test_a_terminal_shows_the_progress_of_the_download(site: Site, cache: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command(site, cache), stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # how a Linux terminal says that nobody writes to it any more
            pass
        finally:
            os.close(ours)
        assert process.wait(WAIT_S) == 0
    for name in SHAPES:
        assert f"MNIST: {name}".encode() in shown
