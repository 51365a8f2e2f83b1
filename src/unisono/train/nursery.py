# SPDX-License-Identifier: Apache-2.0
"""The nursery: loads torch and Unisono once, then forks a worker for every request of its host.

Started by `control.nursery` as ``python -m unisono.train.nursery MODULES``, which are loaded as well. It computes
nothing and starts no thread, so that what it forks is as good as new; a worker is forked twice over, so that the host
and not the nursery becomes its parent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
from typing import NoReturn

from unisono.core import process
from unisono.train import worker
from unisono.wire.channel import FD_VARIABLE, NURSERY_VARIABLE

_LONGEST_REQUEST = 1 << 18
# Whatever almost every script needs in the end.
_LOADED = ("torch", "torch.utils.data", "unisono.train.trainer", "unisono.train.own_loop")


def main() -> int:
    process.die_with_parent()
    process.show_as("nursery")
    door = socket.socket(fileno=int(os.environ.pop(NURSERY_VARIABLE)))
    for name in (*_LOADED, *sys.argv[1:]):
        with contextlib.suppress(Exception):  # the script will meet it too, and say whose line it was
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a worker then does not touch, and so copy, what it shares with the others
    while True:
        try:
            data, files, _, _ = socket.recv_fds(door, _LONGEST_REQUEST, 2)
        except OSError:
            return 0
        if not data:
            return 0
        request = json.loads(data)
        answer: dict[str, object] = {"worker": request["worker"]}
        try:
            answer["pid"] = _bear(door, json.dumps(request["settings"]), files)
        except OSError as error:
            answer["error"] = error.strerror
        for number in files:
            os.close(number)
        door.send(json.dumps(answer).encode())


def _bear(door: socket.socket, settings: str, files: list[int]) -> int:
    """The new worker's process id. The one in between says it and ends, so that the worker falls to the host."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(writing, f"-{error.errno}".encode())
            os._exit(1)
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        door.close()
        _live(settings, files, between)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = int(answer.read() or "-5")
    os.waitpid(between, 0)
    if said < 0:
        raise OSError(-said, os.strerror(-said))
    return said


def _live(settings: str, files: list[int], between: int) -> NoReturn:
    channel, output = files
    os.setsid()  # its own group: one kill takes its loader processes along
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ |= {worker.VARIABLE: settings, FD_VARIABLE: str(channel)}
    while os.getppid() == between:  # it is about to end
        time.sleep(0.0002)
    sys.argv = [worker.__file__]
    worker.leave(worker.main())


if __name__ == "__main__":
    sys.exit(main())
