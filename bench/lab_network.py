# SPDX-License-Identifier: Apache-2.0
"""Hosts of their own on one machine, and a network between them with the rate and the distance of a real one.

    with Lab(PROFILES["100mbit-20ms"], hosts=4) as lab:
        print(lab.shape)                                # as measured, not as asked for
        lab.run([[python, "script.py", host.ip] for host in lab.hosts], folder, timeout_s=60)

Every host hangs on the switch by a cable of its own; `tc` limits it both ways, with a queue, and lab_relay.py makes up
the distance. The hosts are those of tests/chaos (namespaces for processes, network, mounts, names). Nothing has a name
that could outlive us: all of it ends at the end of a pipe from us, even if we are killed. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from measure import BENCH, Failed, Word, environment, note

sys.path.append(str(BENCH.parent / "tests"))

from chaos.hosts import Host, HostProcess, Network
from chaos.relay import end, next_line

_ORDERS_S = 20.0
_BURST_S = 0.002  # of the rate at once: a real card also sends in bursts, and the kernel's timers need some
_LEAST_BURST = 16_384
_TAIL_LINES = 8
_FOLDER = "unisono-lab-"  # then the process id of whose it is


@dataclass(frozen=True)
class Profile:
    """What a host's cable carries each way, and the round trip between two hosts. A rate of 0: as fast as it goes."""

    name: str
    text: str
    rate_mbit: float = 0.0
    round_trip_ms: float = 0.0
    queue_ms: float = 0.0  # what may wait for its turn, each way

    @property
    def bytes_per_s(self) -> float:
        return self.rate_mbit * 1e6 / 8


ONE_HOST = Profile("one-host", "one host")
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("10gbit", "10 Gbit", 10_000, 0, 5),
        # Four hosts share the two cores here. What 10 Gbit is to hosts of two cores each, in slow motion:
        Profile("2.5gbit", "2.5 Gbit", 2_500, 0, 20),
        Profile("1gbit-1ms", "1 Gbit, 1 ms", 1_000, 1, 10),
        Profile("100mbit-20ms", "100 Mbit, 20 ms", 100, 20, 50),
    )
}


class Star(Network):
    """The network of tests/chaos with other cables: Ethernet to a switch, `tc` at both ends, distance on request."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(mtu=1500)
        self.profile = profile
        self._relay_process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Star:
        assert os.geteuid() == 0, "a network of hosts needs root: run this benchmark as root"
        assert Path("/dev/net/tun").exists(), "a network of hosts needs /dev/net/tun: modprobe tun"
        self.switch = Host(self, "switch", "10.78.0.254", {})
        self._tell(self.switch, "ip link add br0 type bridge", "ip address add 10.78.0.254/24 dev br0")
        self._tell(self.switch, "ip link set br0 up", *_settings(forward=True))
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.switch._take_down)
            if self._relay_process is not None:
                stack.callback(end, self._relay_process)
            for host in self.hosts.values():
                stack.callback(host._take_down)

    def add(self, name: str) -> Host:
        self._number = 0
        self._addresses[name] = f"10.78.0.{len(self._addresses) + 1}"
        return self.host(name)

    def stretch(self) -> None:
        """Give the hosts their distance: what they send goes through the relay, what they get comes by cable."""
        if not self.profile.round_trip_ms:
            return
        places = [f"/proc/{host._init}/ns/net" for host in (self.switch, *self.hosts.values())]
        one_way_s = self.profile.round_trip_ms / 2e3
        command = [sys.executable, "-I", "-S", str(BENCH / "lab_relay.py"), repr(one_way_s), *places]
        self._relay_process = subprocess.Popen(
            command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        said = next_line(self._relay_process)
        assert said == b"ready", f"the relay did not start: {said.decode(errors='replace')}"
        self._tell(self.switch, "ip link set wan up")
        for host in self.hosts.values():
            self._tell(
                host,
                "ip link set wan txqueuelen 10000 up",
                self._limit("wan"),
                "tc qdisc del dev eth0 root",
                f"ip route del 10.78.0.0/24 dev eth0 src {host.ip}",
                f"ip route add 10.78.0.0/24 dev wan src {host.ip}",
                "ip route replace 10.78.0.254/32 dev eth0",
                f"ip route replace default dev wan src {host.ip}",
            )

    def _plug(self, host: Host) -> None:
        port = f"to-{host.name}"
        ends = f"name eth0 netns {host._init} type veth peer name {port} netns {self.switch._init}"
        subprocess.run(["ip", "link", "add", *ends.split()], check=True, timeout=_ORDERS_S)
        self._tell(
            host,
            *_settings(forward=False),
            f"ip address add {host.ip}/24 dev eth0",
            "ip link set eth0 txqueuelen 10000 up",
            "ip route add default dev eth0",
            self._limit("eth0"),
        )
        self._tell(self.switch, f"ip link set {port} txqueuelen 10000 master br0 up", self._limit(port))

    def _limit(self, device: str) -> str:
        profile = self.profile
        if not profile.rate_mbit:
            return "true"
        burst = max(_LEAST_BURST, int(profile.bytes_per_s * _BURST_S))
        limits = f"rate {profile.rate_mbit:g}mbit burst {burst} latency {profile.queue_ms:g}ms"
        return f"tc qdisc add dev {device} root tbf {limits}"

    def _tell(self, host: Host, *orders: str) -> None:
        inside = ["nsenter", f"--net=/proc/{host._init}/ns/net", "sh", "-e"]
        done = subprocess.run(inside, input="\n".join(orders), text=True, capture_output=True, timeout=_ORDERS_S)
        if done.returncode:
            raise Failed(f"the network of {host.name} could not be set up: {done.stderr.strip()}")

    def _silence(self, host: Host) -> None:
        pass  # nobody needs the last words of a host that is taken down with its network

    def _unplug(self, host: Host) -> None:
        pass


def _settings(forward: bool) -> list[str]:
    """What comes by another way than it went must not be dropped for that."""
    values = {
        "net/ipv4/ip_forward": str(int(forward)),
        "net/ipv4/conf/all/rp_filter": "0",
        "net/ipv4/conf/default/rp_filter": "0",
        "net/ipv6/conf/all/disable_ipv6": "1",
        "net/ipv6/conf/default/disable_ipv6": "1",
    }
    return [f"if [ -e /proc/sys/{name} ]; then echo {value} > /proc/sys/{name}; fi" for name, value in values.items()]


@dataclass(frozen=True)
class Shape:
    """The network as two programs on its hosts saw it."""

    round_trip_ms: float
    out_mbit: float  # one host to another
    in_mbit: float  # all others to one

    def __str__(self) -> str:
        return (
            f"round trip {self.round_trip_ms:.2f} ms, {self.out_mbit:,.0f} Mbit/s from one host to another, "
            f"{self.in_mbit:,.0f} Mbit/s from all others to one"
        )

    def holds(self, profile: Profile) -> bool:
        """Whether it is the network that was asked for, give or take 15 % (and half a millisecond)."""
        rates = (self.out_mbit, self.in_mbit)
        late_ms = self.round_trip_ms - profile.round_trip_ms
        return late_ms < 0.5 + 0.15 * profile.round_trip_ms and all(rate > 0.85 * profile.rate_mbit for rate in rates)


class Lab:
    """`hosts` hosts on a network of that profile, gone at the end of the ``with`` block."""

    def __init__(self, profile: Profile, hosts: int, measured_s: float = 2.0) -> None:
        self.profile, self._count, self._measured_s = profile, hosts, measured_s
        self.shape: Shape | None = None

    def __enter__(self) -> Lab:
        remove_leftovers()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.star = stack.enter_context(Star(self.profile))
            self.hosts = [self.star.add(chr(ord("a") + number)) for number in range(self._count)]
            self.star.stretch()
            if self._count > 1:
                self.shape = self._measure()
                if not self.shape.holds(self.profile):
                    note(f"this is not {self.profile.text}: {self.shape}; the machine is too busy for it")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _measure(self) -> Shape:
        with self.sub_folder() as folder:
            words = [sys.executable, BENCH / "lab_probe.py", f"{self._measured_s:g}"]
            addresses = [host.ip for host in self.hosts]
            commands = [[*words, str(rank), *addresses] for rank in range(self._count)]
            outputs = self.run(commands, folder, timeout_s=30 + 3 * self._measured_s)
            return Shape(**json.loads(outputs[0].splitlines()[-1]))

    @contextlib.contextmanager
    def sub_folder(self) -> Iterator[Path]:
        """A directory that all hosts see, gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            yield Path(name)

    def start(
        self, host: Host, command: Sequence[Word], folder: Path, more: Mapping[str, str] | None = None
    ) -> HostProcess:
        """The command on that host, with what every benchmark's command has in its environment."""
        cleaned = dict.fromkeys(os.environ) | environment() | {"GLOO_SOCKET_IFNAME": "eth0", **(more or {})}
        return host.start([str(word) for word in command], folder, cleaned)

    def run(
        self,
        commands: Sequence[Sequence[Word]],
        folder: Path,
        timeout_s: float,
        more: Mapping[str, str] | None = None,
    ) -> list[str]:
        """One command on each host (all on the first if there is only one), to their ends; what each printed."""
        with contextlib.ExitStack() as stack:
            started = []
            for number, command in enumerate(commands):
                host = self.hosts[number % len(self.hosts)]
                started.append(stack.enter_context(self.start(host, command, folder, more)))
            wait_for_all(started, timeout_s)
            return [process.output for process in started]


def wait_for_all(started: Sequence[HostProcess], timeout_s: float) -> None:
    """Until all have ended well; `Failed` as soon as one does not, or the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [process.process.poll() for process in started]
        if not any(code is None for code in codes) and not any(codes):
            return
        for process, code in zip(started, codes, strict=True):
            if code:
                time.sleep(0.5)  # the others may say why
                raise Failed(f"exit code {code} on host {process.host.name}\n{tails(started)}")
        if time.monotonic() > deadline_s:
            raise Failed(f"still running after {timeout_s:.0f} s, stopped\n{tails(started)}")
        time.sleep(0.01)


def tails(started: Sequence[HostProcess]) -> str:
    """The end of what each printed, without the places of this machine."""
    parts = []
    for process in started:
        parts.append(f"  host {process.host.name}: {process.command[1:3]}")
        parts += [f"    {line}" for line in process.output.strip().splitlines()[-_TAIL_LINES:]]
    return "\n".join(parts).replace(f"{BENCH.parent}{os.sep}", "")


def remove_leftovers() -> None:
    """Files of a benchmark that was killed; its hosts and devices went with it."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        owner = path.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
