# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: namespaces for the hosts, TUN devices and relay.py for the network between them.

    with Network() as net:
        a, b = net.host("a"), net.host("b")
        started = b.start([sys.executable, "serve.py"], tmp_path)    # a Started, as of multiproc/running.py
        net.link("b").cut()                                          # silence, no reset; then mend()
        b.power_off()

Nothing has a name that could outlive us: namespaces hang on the host's init and devices on the relay's descriptors, and
both processes end at the end of a pipe from us, even if we are killed. Hosts share the disk, not /dev/shm; for a disk
of its own let a host mount one: ``b.run(["mount", "-t", "tmpfs", "none", FOLDER])``. Needs root, Linux and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from chaos.relay import Link, Relay, end, next_line, setns
from multiproc.running import Finished, Started, descendants
from unisono.core import events
from unisono.core.run_dir import RunDir

_NEWNET, _NEWPID = 0x40000000, 0x20000000
_KINDS = {"net": _NEWNET, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000}  # entered by a command, mnt last
_READY_S = 10.0

# The life of a host. Files of its own lie in a tmpfs that nobody else sees; /sys is mounted anew to show the host's own
# devices. With CHLD ignored the kernel takes orphans away, and the end of stdin is the end of the host. (A shell's own
# `read` would not do: it fails when an orphan dies.)
_INIT = """
set -e
hostname "$0"
mount -t tmpfs none /mnt
mkdir /mnt/cgroup
mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t sysfs sysfs /sys
mount --rbind /mnt/cgroup /sys/fs/cgroup
for file in hosts resolv.conf; do
    touch /mnt/$file
    mount --bind /mnt/$file "$(readlink -f /etc/$file)"
done
umount -l /mnt
mount -t tmpfs none /dev/shm
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""


class HostProcess(Started):
    """A command that runs on a host. `pid` and `worker_pid` are as seen from here, its own events as from there."""

    def __init__(
        self, host: Host, command: Sequence[str], folder: Path, env: Mapping[str, str | None] | None, **popen: Any
    ) -> None:
        self.host = host
        with host._births():
            super().__init__(command, folder, env, preexec_fn=host._entrance(folder), **popen)
        self.pid_there = _pids_of(self.pid)[-1]

    def __enter__(self) -> HostProcess:
        return self

    @property
    def run_dir(self) -> Path | None:
        """The newest that is ours: process ids of a host start anew after a power-off."""
        ours = (self.pid_there, self.host.hostname)
        found = []
        for path in (*self._named_dirs(), *(self.folder / "runs").glob("*")):
            first = next(events.read(RunDir(path).events), None) if path.is_dir() else None
            if isinstance(first, events.RunStarted) and (first.pid, first.host) == ours:
                found.append(path)
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)

    def worker_pid(self, worker: int) -> int:
        """The process id of a worker, on whichever host it is, for a signal from here."""
        there = super().worker_pid(worker)
        name = next(event.host for event in self.events_of(events.WorkerStarted) if event.worker == worker)
        return next(host for host in self.host.network.hosts.values() if host.hostname == name).pid_here(there)


class Host:
    """A machine of its own: processes, network, mounts, name. Made by `Network.host`."""

    def __init__(self, network: Network, name: str, address: str, overrides: Mapping[str, str | None]) -> None:
        self.network, self.name, self.ip, self.device, self._overrides = network, name, address, "eth0", overrides
        self.hostname, self.on = name, True
        self._started: list[HostProcess] = []
        namespaces = ["--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "--mount-proc", "--kill-child"]
        self._life = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", _INIT, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
        try:
            said = next_line(self._life)
            assert said == b"ready", f"host {name} did not start: {said.decode(errors='replace')}"
            self._init = psutil.Process(self._life.pid).children()[0].pid
            self._namespaces = {
                kind: os.open(f"/proc/{self._init}/ns/{kind}", os.O_RDONLY) for kind in (*_KINDS, "pid")
            }
        except BaseException:
            end(self._life)
            raise

    def start(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str | None] | None = None, **popen: Any
    ) -> HostProcess:
        """The command, running on this host; a context manager."""
        process = HostProcess(self, command, folder, env, **popen)
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        timeout_s: float = 30,
        folder: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        expect: int | None = 0,
    ) -> Finished:
        """The command on this host, to its end."""
        with contextlib.ExitStack() as stack:
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR"))))
            return stack.enter_context(self.start(command, folder, env)).wait(timeout_s, expect)

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket on this host's network in the hands of the test: it speaks by address and outlives a power-off."""
        with _entered(self._namespace("net"), _NEWNET, "net"):
            return socket.socket(socket.AF_INET, kind)

    def pids(self, pattern: str = "") -> list[int]:
        """Its processes whose command line contains that regular expression, by the ids that they have here."""
        return [pid for pid in self._processes() if re.search(pattern, _command_line(pid))]

    def pid_here(self, pid_there: int) -> int:
        """The id here of the process that has this id on the host."""
        found = [pid for pid in self._processes() if _pids_of(pid)[-1:] == [pid_there]]
        assert found, f"no process {pid_there} on host {self.name}"
        return found[0]

    def power_off(self, reset: bool = False) -> None:
        """Everything on it dies at once, and nobody is told.

        With `reset`, as if all its processes were killed: the kernel lives on, closes connections and refuses new ones.
        A host of the same name can be made after; it gets the same address.
        """
        if not self.on:
            return
        self.on = False
        try:
            if not reset:
                self.network._silence(self)
        finally:
            self._kill()
        if not reset:
            self.network._unplug(self)

    def _take_down(self) -> None:
        self.power_off()

    def _kill(self) -> None:
        if self._life.poll() is None:
            os.kill(self._init, signal.SIGKILL)
        for process in self._started:  # init waits until we have taken ours away
            process.process.wait(_READY_S)
        end(self._life)
        for namespace in self._namespaces.values():
            os.close(namespace)

    def _namespace(self, kind: str) -> int:
        assert self.on, f"host {self.name} is powered off"
        return self._namespaces[kind]

    def _processes(self) -> Iterator[int]:
        """But for init."""
        if not self.on:
            return
        ours = os.fstat(self._namespace("pid")).st_ino
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if pid != self._init and os.stat(f"/proc/{pid}/ns/pid").st_ino == ours:
                    yield pid

    def _births(self) -> contextlib.AbstractContextManager[None]:
        """What this thread starts meanwhile is our child as usual, and a process of the host."""
        return _entered(self._namespace("pid"), _NEWPID, "pid")

    def _entrance(self, folder: Path, /) -> Callable[[], None] | None:
        """For the new process, before it becomes the command: into the host's other namespaces."""

        def enter() -> None:
            for kind, flag in _KINDS.items():
                setns(self._namespaces[kind], flag)
            os.chdir(folder)

        return enter

    def _namespace_path(self) -> str | None:
        return f"/proc/{self._init}/ns/net"

    def _name_hosts(self, addresses: Mapping[str, str]) -> None:
        named: dict[str, str | None] = {**addresses, **self._overrides}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in named.items() if address)]
        Path(f"/proc/{self._init}/root/etc/hosts").write_text("\n".join(lines) + "\n")


class PlainHost(Host):
    """The machine of the test itself, plugged into the network: it has an address there, but knows no host by name."""

    def __init__(self, network: Network, name: str, address: str, device: str) -> None:
        self.network, self.name, self.ip, self.device = network, name, address, device
        self.hostname, self.on, self._started = socket.gethostname(), True, []

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        return socket.socket(socket.AF_INET, kind)

    def power_off(self, reset: bool = False) -> None:
        raise AssertionError(f"host {self.name} is this machine: it stays on, {reset=} or not")

    def _take_down(self) -> None:
        for process in self._started:
            process.end()

    def _processes(self) -> Iterator[int]:
        for started in self._started:
            yield from (started.pid, *(process.pid for process in descendants(started.pid)))

    def _births(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _entrance(self, _: Path, /) -> None:
        return None

    def _namespace_path(self) -> None:
        return None

    def _name_hosts(self, addresses: Mapping[str, str]) -> None:
        pass


class Network:
    """A star: every host on a link of its own, relay.py in the middle. Leave the ``with`` block and all of it is gone.

    The large packets of the default make it fast (the relay's cost is per packet); for loss as on a real network take
    an `mtu` of 1500. `seed` decides which packets are lost.
    """

    def __init__(self, mtu: int = 60_000, seed: int = 0) -> None:
        self.mtu, self._seed = mtu, seed
        self.hosts: dict[str, Host] = {}
        self._addresses: dict[str, str] = {}
        self._plugged: set[str] = set()

    def __enter__(self) -> Network:
        assert os.geteuid() == 0, "a network of test hosts needs root: run the tests as root"
        assert Path("/dev/net/tun").exists(), "a network of test hosts needs /dev/net/tun: modprobe tun"
        self._number, self._reservation = _reserve()
        self._relay = Relay(self.mtu, self._seed)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._reservation.close)
            stack.callback(self._relay.end)
            for host in self.hosts.values():
                stack.callback(host._take_down)

    def host(self, name: str, hosts_overrides: Mapping[str, str | None] | None = None, plain: bool = False) -> Host:
        """A new host, or one of a name that was powered off.

        `hosts_overrides` falsifies its /etc/hosts: another address for a name, or None for none. A `plain` host is this
        machine itself; it costs nothing, but has no names and cannot be powered off.
        """
        assert name not in self.hosts or not self.hosts[name].on, f"there is a host {name} already"
        if name in self.hosts:
            self._unplug(self.hosts[name])
        address = self._addresses.setdefault(name, f"10.77.{self._number}.{len(self._addresses) + 1}")
        host = (
            PlainHost(self, name, address, f"unitest{self._number}")
            if plain
            else Host(self, name, address, hosts_overrides or {})
        )
        self.hosts[name] = host
        self._plug(host)
        for each in self.hosts.values():
            if each.on:
                each._name_hosts(self._addresses)
        return host

    def link(self, host: str) -> Link:
        """The link of that host."""
        return Link(self._relay, host)

    def _plug(self, host: Host) -> None:
        namespace = host._namespace_path()
        self._relay.ask("attach", host.name, address=host.ip, device=host.device, namespace=namespace)
        self._plugged.add(host.name)
        orders = [
            f"address add {host.ip}/24 dev {host.device}",
            f"link set {host.device} mtu {self.mtu} txqueuelen 10000 up",
            *([f"route add default dev {host.device}"] if namespace else []),
        ]
        inside = ["nsenter", f"--net={namespace}"] if namespace else []
        subprocess.run([*inside, "ip", "-batch", "-"], input="\n".join(orders), text=True, check=True, timeout=_READY_S)

    def _silence(self, host: Host) -> None:
        if host.name in self._plugged:
            self.link(host.name).cut()

    def _unplug(self, host: Host) -> None:
        if host.name in self._plugged:
            self._plugged.remove(host.name)
            self._relay.ask("detach", host.name)


def _reserve() -> tuple[int, socket.socket]:
    """A number that no other network on this machine has while the socket is open."""
    for number in range(1, 255):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0unisono-test-network-{number}")
        except OSError:
            claim.close()
        else:
            return number, claim
    raise AssertionError("254 test networks on this machine already")


def _pids_of(pid: int) -> list[int]:
    """The ids of a process, from the outermost namespace to its own; nothing for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return []
    return [int(number) for line in status.splitlines() if line.startswith("NSpid:") for number in line.split()[1:]]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _entered(namespace: int, flag: int, kind: str) -> Iterator[None]:
    """This thread in another namespace; with pid, its future children and not itself."""
    with open(f"/proc/thread-self/ns/{kind}") as home:
        setns(namespace, flag)
        try:
            yield
        finally:
            setns(home.fileno(), flag)
