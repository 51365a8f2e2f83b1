# SPDX-License-Identifier: Apache-2.0
"""For every test that starts processes: nothing that it started may outlive it. And what tests of all kinds share.

The first applies to tests/multiproc, tests/chaos and tests/e2e without being asked for. Import the helper that starts
things with ``from multiproc.running import run_unisono``; this folder is on the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from multiproc.running import MARK, gone_within, left_behind

_WATCHED = ("multiproc", "chaos", "e2e")
_GONE_WITHIN_S = 2.0

# Hundreds of processes are started, each of which would otherwise compile all of Unisono's source for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started behind a shell: what we start would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread_each() -> Iterator[None]:
    """Where ranks are threads: with more of torch's own each, they would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process or a temporary directory of Unisono behind, and removes it."""
    if not set(_WATCHED) & set(request.path.relative_to(Path(__file__).parent).parts):
        yield
        return
    mark, tmp_path = uuid.uuid4().hex, request.getfixturevalue("tmp_path")
    # Short, because sockets of loader processes live in it and their paths may have 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="ut-"))
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(temporary / "config"))  # the key that receipts are signed with
    try:
        yield
        clean = gone_within(_GONE_WITHIN_S, lambda: left_behind(mark, tmp_path))
        processes = [] if clean else left_behind(mark, tmp_path)
        folders = [path.name for pattern in ("unisono-*", "pymp-*") for path in temporary.glob(pattern)]
        names = [_end(process) for process in processes]
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if names or folders:
        pytest.fail(f"left behind: processes {names}, temporary directories {folders}")


def _end(process: psutil.Process) -> str:
    """Kill it and say what it was."""
    name = f"pid {process.pid}"
    with contextlib.suppress(psutil.Error):
        name += ": " + " ".join(process.cmdline())
        process.kill()
    return name
