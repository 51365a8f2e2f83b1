# SPDX-License-Identifier: Apache-2.0
"""What may be wrong when a host joins: each fault is planted, and within 20 s one line names it and one cures it.

One run on host a goes on through all of this and must not notice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.hosts import Host, HostProcess
from chaos.joining import SCRIPT, STEPS, UNISONO, Lab, line_of, removed, wait_for_members
from multiproc.running import Finished, gone_within, left_behind
from unisono.core import events

WITHIN_S = 20.0
ENDLESS = SCRIPT.replace(f"max_steps={STEPS}", "max_steps=1_000_000")
ELSEWHERE = "192.168.50.2"  # an address of host b that host a cannot reach
PROBES = range(40_000, 40_020)  # all ports that host b may choose for itself

# What a machine with another clock, torch or Python would say; sitecustomize runs before anything else.
CLOCK = "import time; real = time.time; time.time = lambda: real() + 3600"
TORCH = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "2.9.1" if name == "torch" else real(name)
"""
PYTHON = "import platform; platform.python_version = lambda: '3.13.2'"


@dataclass
class Scene:
    lab: Lab
    b: Host
    confused: Host  # thinks that everybody is itself
    run: HostProcess
    address: str
    secret: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def try_to_join(
        self, folder: Path, *options: str, address: str = "", secret: str = "", host: Host | None = None, shim: str = ""
    ) -> Finished:
        """``unisono join`` on host b, unless it is another; `shim` is Python that its processes run first."""
        command = ["join", address or self.address, "--secret", secret or self.secret, *options]
        return self._start(command, folder, host or self.b, shim).wait(WITHIN_S, expect=None)

    def examine(self, folder: Path, *arguments: str, shim: str = "") -> Finished:
        """``unisono doctor`` on host b."""
        return self._start(["doctor", *arguments], folder, self.b, shim).wait(30, expect=None)

    def _start(self, command: list[str], folder: Path, host: Host, shim: str) -> HostProcess:
        env: dict[str, str | None] = {}
        if shim:
            (folder / "shim").mkdir()
            (folder / "shim" / "sitecustomize.py").write_text(shim)
            env["PYTHONPATH"] = os.pathsep.join([str(folder / "shim"), os.environ.get("PYTHONPATH", "")])
        return host.start([*UNISONO, *command], folder, env)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, temporary = tmp_path_factory.mktemp("run"), Path(tempfile.mkdtemp(prefix="ut-"))
    with pytest.MonkeyPatch.context() as patch:  # until the first test sets its own
        patch.setenv("TMPDIR", str(temporary))
        lab = Lab(folder, script=ENDLESS)
        lab.__enter__()
        try:
            b = lab.host("b")
            b.run(["ip", "address", "add", f"{ELSEWHERE}/32", "dev", "lo"], folder=folder)
            confused = lab.host("d", {"a": "127.0.1.1", "d": "127.0.1.1"})
            run = lab.run("--workers", "1:2")
            address, secret = line_of(run)
            run.wait_for_steps(1)
        except BaseException:
            lab.__exit__()
            raise
    try:
        yield Scene(lab, b, confused, run, address, secret)
        lab.go()
        run.wait_for_steps(len(run.events_of(events.StepFinished)) + 5)
        assert [event.members for event in run.events_of(events.MembershipChanged)] == [[0]], "it has noticed something"
        run.send(signal.SIGINT)
        run.wait(10, expect=130)
    finally:
        lab.__exit__()
        shutil.rmtree(temporary, ignore_errors=True)
    assert gone_within(2, lambda: left_behind("nobody's", folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where host b has its own copy of the script."""
    (tmp_path / "train.py").write_text(ENDLESS)
    return tmp_path


def diagnosis(finished: Finished, code: str, exit_code: int = 21) -> str:
    """The one line that names the fault. The next one says what to do, and there is no other."""
    assert finished.seconds < WITHIN_S
    assert finished.exit_code == exit_code, finished.output
    what, *rest = finished.output.splitlines()
    assert what.startswith(f"{code}  "), finished.output
    assert len(rest) == 1, finished.output
    assert rest[0].startswith("  do      "), finished.output
    return what


def test_a_wrong_port(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, address=f"{scene.lab.a.ip}:1"), "UNI-2102")
    assert f"nothing listens on port 1 at {scene.lab.a.ip}: it refused the connection from b" in said


def test_a_port_behind_a_firewall(scene: Scene, folder: Path) -> None:
    scene.lab.net.link("a").block(scene.port, direction="in")
    try:
        said = diagnosis(scene.try_to_join(folder), "UNI-2102")
    finally:
        scene.lab.net.link("a").unblock()
    assert f"no answer from {scene.address} in 5 s (tried from {scene.b.ip} on eth0): a firewall drops it" in said


def test_a_name_that_nobody_knows(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, address=f"nowhere.example:{scene.port}"), "UNI-2102")
    assert "b cannot resolve the name nowhere.example" in said


@pytest.mark.parametrize(
    ("greeting", "why"), [(b"SSH-2.0-OpenSSH_9.2\r\n", "SSLError"), (b"", "it says nothing")], ids=["talks", "silent"]
)
def test_a_port_of_another_program(scene: Scene, folder: Path, greeting: bytes, why: str) -> None:
    with scene.lab.a.socket() as listening:
        listening.bind((scene.lab.a.ip, 0))
        listening.listen()
        address = "{}:{}".format(*listening.getsockname())
        ended = threading.Event()
        threading.Thread(target=_greet, args=(listening, greeting, ended)).start()
        try:
            said = diagnosis(scene.try_to_join(folder, address=address), "UNI-2102")
        finally:
            ended.set()
    assert said.startswith(f"UNI-2102  what answers at {address} is not a run of Unisono ({why}")


def _greet(listening: socket.socket, greeting: bytes, ended: threading.Event) -> None:
    peer, _ = listening.accept()
    with peer:
        peer.sendall(greeting)
        ended.wait(WITHIN_S)


def test_a_name_that_leads_back_to_the_host_itself(scene: Scene, folder: Path) -> None:
    d = scene.confused
    said = diagnosis(scene.try_to_join(folder, address=f"a:{scene.port}", host=d), "UNI-2103")
    assert "d resolves the name a to 127.0.1.1, which is d itself and not another host" in said
    there = d.start([*UNISONO, "run", "train.py", "--listen", "d", "--name", "mine"], folder).wait(
        WITHIN_S, expect=None
    )
    said = diagnosis(there, "UNI-2103")
    assert "d resolves the name d to 127.0.1.1: listening there, it could not be reached by other hosts" in said
    assert not (folder / "runs").exists(), "nothing was started, and the name is not taken"


def test_an_address_that_the_host_does_not_have(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, "--address", "10.9.9.9"), "UNI-2104")
    assert f"b has no address 10.9.9.9: its own are {ELSEWHERE} (lo), {scene.b.ip} (eth0)" in said


def test_an_interface_that_the_run_cannot_reach(scene: Scene, folder: Path) -> None:
    finished = scene.try_to_join(folder, "--address", ELSEWHERE)
    said = diagnosis(finished, "UNI-2104")
    assert re.search(rf"a cannot connect back to b at {ELSEWHERE}:\d+ \(no answer in 4 s\)", said)
    assert f"though b reached a from {scene.b.ip}: b announces the wrong interface" in said
    assert f"join with --address {scene.b.ip}" in finished.output


def test_no_way_back(scene: Scene, folder: Path) -> None:
    choose = f"echo {PROBES.start} {PROBES.stop - 1} > /proc/sys/net/ipv4/ip_local_port_range"
    scene.b.run(["sh", "-c", choose], folder=folder)
    for port in PROBES:
        scene.lab.net.link("b").block(port, direction="in")
    try:
        said = diagnosis(scene.try_to_join(folder), "UNI-2102")
    finally:
        scene.lab.net.link("b").unblock()
    assert f"a cannot connect back to b at {scene.b.ip}:400" in said
    assert "though b can connect to a: b lets no connection in" in said


def test_a_run_that_listens_on_loopback_only(scene: Scene, folder: Path) -> None:
    with scene.lab.run("--workers", "1:2", listen="127.0.0.1") as run:
        pattern = re.compile(
            r"unisono join (127\.0\.0\.1:\d+) .*\(only on this machine: nobody else reaches 127\.0\.0\.1\)"
        )
        (address,) = run.until(lambda: pattern.search(run.output), "the line and its warning").groups()
        said = diagnosis(scene.try_to_join(folder, address=address), "UNI-2102")
        assert "127.0.0.1 is b itself (lo)" in said
        run.send(signal.SIGINT)
        run.wait(10, expect=130)


def test_a_wrong_secret(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, secret="K7QF-2M9X-AAAA-BBBB"), "UNI-2109")
    assert f"the join secret is not that of the run at {scene.address}: it is mistyped, or of another run" in said


def test_a_clock_that_is_wrong(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, shim=CLOCK), "UNI-2105")
    assert re.search(r"the clock of b is (1:00 h|59:59 min) ahead of that of a: b has \S+, a has \S+ \(UTC\)", said)


def test_another_version_of_torch(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, shim=TORCH), "UNI-2106")
    assert re.search(r"torch differs: b has 2\.9\.1, a has 2\.\d+\.\d+", said)


def test_another_python(scene: Scene, folder: Path) -> None:
    said = diagnosis(scene.try_to_join(folder, shim=PYTHON), "UNI-2106")
    here = ".".join(map(str, sys.version_info[:3]))
    assert f"python differs: b has 3.13.2, a has {here}" in said


def test_another_script(scene: Scene, folder: Path) -> None:
    (folder / "train.py").write_text(ENDLESS.replace("lr=0.1", "lr=0.2"))
    said = diagnosis(scene.try_to_join(folder), "UNI-2107")
    size = f"{len(ENDLESS):,} bytes"
    file = rf"sha256 [0-9a-f]{{12}}… \({re.escape(size)}, changed .* ago\)"
    assert re.search(rf"train\.py differs: b has {file}, a has {file}", said)


def test_no_script_at_all(scene: Scene, tmp_path: Path) -> None:
    said = diagnosis(scene.try_to_join(tmp_path), "UNI-1003", exit_code=2)
    assert f"the run's script train.py is not on b: looked in {tmp_path}" in said


def test_other_data_is_named_with_both_values_and_the_run_goes_on(scene: Scene, folder: Path) -> None:
    """Found when the worker has read its data, so this one takes the start of a worker."""
    (folder / "data.json").write_text(json.dumps([[float(row + column) for column in range(4)] for row in range(64)]))
    finished = scene.try_to_join(folder, "--workers", "1")
    assert finished.seconds < WITHIN_S
    assert finished.exit_code == 13, finished.output
    joined, what, *_ = finished.output.splitlines()
    assert joined.startswith("b: joined ")
    assert re.match(
        r"UNI-1401  worker 1 reads other data than worker 0 under the same sample ids \(digest \w+, not \w+\)",
        what,
    )
    assert removed(scene.run) == [(1, "b", "refused")]
    scene.run.wait_for_steps(len(scene.run.events_of(events.StepFinished)) + 3)
    wait_for_members(scene.run, 0, timeout_s=1)


def test_a_script_that_fails_on_the_joining_host_alone_does_not_end_the_run(scene: Scene, folder: Path) -> None:
    (folder / "data.json").write_text("not json")
    finished = scene.try_to_join(folder, "--workers", "1")
    assert finished.exit_code == 10, finished.output
    assert "json.decoder.JSONDecodeError" in finished.output, "its traceback"
    assert "UNI-1101  JSONDecodeError" in finished.output
    scene.run.until(lambda: "of b cannot take part: JSONDecodeError" in scene.run.output, "a word about it")
    scene.run.wait_for_steps(len(scene.run.events_of(events.StepFinished)) + 3)


def test_the_doctor_runs_the_same_checks(scene: Scene, folder: Path) -> None:
    sloppy = scene.secret.lower().replace("-", " ")
    well = scene.examine(folder, f"a:{scene.port}", "--secret", sloppy)
    for line in (r"ok +name +a is 10\.", r"ok +clock +a is within", r"ok +versions, script +the same on both"):
        assert re.search(rf"^{line}", well.output, re.MULTILINE), well.output
    assert re.search(rf"^ok +way back +a reaches {scene.b.ip}$", well.output, re.MULTILINE), well.output
    assert not re.search(r"^bad ", well.output, re.MULTILINE), well.output
    skewed = scene.examine(folder, scene.address, "--secret", scene.secret, shim=CLOCK)
    assert skewed.exit_code == 1
    assert re.search(r"^bad +clock +UNI-2105  the clock of b is", skewed.output, re.MULTILINE), skewed.output
