# SPDX-License-Identifier: Apache-2.0
"""A disk that begins to fail: from a moment on, the kernel answers some of this process's system calls with an error.

    fail_from_now_on("fsync")           # every fsync of every thread is answered with EIO, as by a dying disk

Done with a seccomp filter, which takes no privileges and cannot be taken back: meant for a process that is about to
end. What it starts afterwards fails in the same way. Linux on x86-64 and on ARM; used by tests about crash safety.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

_LARGE = 4096  # bytes: what is written to a pipe, a log or a socket to tell about it is less
_NUMBERS = {  # of the calls, by architecture
    "x86_64": {
        "read": 0, "write": 1, "fsync": 74, "rename": 82, "unlink": 87, "getdents64": 217, "openat": 257,
        "renameat": 264, "renameat2": 316, "seccomp": 317, "audit": 0xC000003E,
    },
    "aarch64": {
        "openat": 56, "getdents64": 61, "read": 63, "write": 64, "unlinkat": 35, "renameat": 38, "fsync": 82,
        "renameat2": 276, "seccomp": 277, "audit": 0xC00000B7,
    },
}  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """System calls of these names; all of them, or those whose argument has a bit set or is large enough."""

    names: tuple[str, ...]
    argument: int = -1
    has_bit: int = 0
    at_least: int = 0


CALLS = {
    "create": _Call(("openat",), argument=2, has_bit=os.O_CREAT),
    "write": _Call(("write",), argument=2, at_least=_LARGE),
    "fsync": _Call(("fsync",)),
    "rename": _Call(("rename", "renameat", "renameat2")),
    "list": _Call(("getdents64",)),
    "delete": _Call(("unlink", "unlinkat")),
    "read": _Call(("read",), argument=2, at_least=16 * _LARGE),
}

# Of linux/filter.h, linux/seccomp.h and linux/prctl.h.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8
_NO_NEW_PRIVILEGES, _SET_FILTER, _ALL_THREADS = 38, 1, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def fail_from_now_on(kind: str, number: int = errno.EIO) -> None:
    """Every call of that kind, in every thread, in this process and in those that it starts."""
    numbers = _NUMBERS[platform.machine()]
    instructions = _filter(CALLS[kind], numbers, number)
    memory = ctypes.create_string_buffer(b"".join(instructions))
    program = _Program(len(instructions), ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(
        numbers["seccomp"], _SET_FILTER, _ALL_THREADS, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), f"no seccomp filter: {os.strerror(ctypes.get_errno())}")


def _filter(call: _Call, numbers: dict[str, int], error: int) -> list[bytes]:
    """A program for the kernel's filter machine. Of an argument it looks at the lower four bytes."""
    program = [
        _instruction(_LOAD, _AT_ARCHITECTURE),
        _instruction(_IF_EQUAL, numbers["audit"], skip_if_true=1),
        _instruction(_RETURN, _ALLOW),
    ]
    for name in call.names:
        if name not in numbers:  # an old call that this architecture never had
            continue
        check = []
        if call.argument >= 0:
            condition, value = (_IF_BIT, call.has_bit) if call.has_bit else (_IF_AT_LEAST, call.at_least)
            check = [
                _instruction(_LOAD, _AT_ARGUMENTS + call.argument * _ARGUMENT_BYTES),
                _instruction(condition, value, skip_if_false=1),
            ]
        program += [
            _instruction(_LOAD, _AT_NUMBER),
            _instruction(_IF_EQUAL, numbers[name], skip_if_false=len(check) + 1),
            *check,
            _instruction(_RETURN, _ERRNO | error),
        ]
    return [*program, _instruction(_RETURN, _ALLOW)]


def _instruction(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, skip_if_true, skip_if_false, value)
