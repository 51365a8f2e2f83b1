# SPDX-License-Identifier: Apache-2.0
"""One connection of a formed generation: frames out of and into the memory of tensors.

A frame is a header (tag, bytes) and the bytes. Frames wait in order for the socket; incoming ones are read straight
into the tensor that was posted for their tag, or kept until one is. Nothing blocks and nothing here locks: `mesh_pump`
decides when to read and write, one thread at a time.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from unisono.comm.mesh_talk import Wire
from unisono.comm.mesh_tls import SecureSocket
from unisono.core.errors import PeerLost

_HEADER = struct.Struct("!qQ")
_GOODBYE = -(1 << 62)  # the tag of the last frame; its length says whom the sender has lost: worker + 1, or 0
_STAGE_BYTES = 1 << 15  # what is read at once while we do not know whose it is
_READ_BYTES = 8 << 20  # and in one visit: then it is the other links' turn
_WRITE_FRAMES = 64


@dataclass(frozen=True)
class Loss:
    """Why a generation is over. `worker` is the one to blame, None when it was given up as a whole."""

    what: str
    worker: int | None = None
    cause: str = ""
    out_of_step: bool = False

    def error(self) -> PeerLost:
        """A new one each time: several threads may raise it."""
        lost = PeerLost(self.what, cause=self.cause)
        lost.worker, lost.out_of_step = self.worker, self.out_of_step
        return lost


class Broken(Exception):
    """The connection is of no use any more; carries why."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.what)
        self.loss = loss


class Count:
    """How many messages of one exchange are still under way."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


@dataclass
class _Incoming:
    """A message being read into `memory`: the tensor's, or our own while nobody has asked for it (`count` is None)."""

    memory: memoryview
    count: Count | None = None
    target: memoryview | None = None  # where our own copy shall go once it is whole
    whole: bool = False

    def finish(self) -> None:
        self.whole = True
        if self.target is not None:
            self.target[:] = self.memory
        if self.count is not None:
            self.count.left -= 1


class Link:
    """`left` says that the other worker said goodbye and meant no harm: only those who need it are affected."""

    def __init__(self, sock: Wire, worker: int) -> None:
        self.sock, self.worker = sock, worker
        self.left = False
        self.interest = 0  # what the pump has registered
        self._outgoing: deque[tuple[memoryview, Count | None]] = deque()
        self._posted: dict[int, deque[_Incoming]] = {}
        self._early: dict[int, deque[_Incoming]] = {}
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._staged = 0  # bytes of an incomplete header at the start of the stage
        self._current: _Incoming | None = None
        self._rest = memoryview(b"")  # of the current message's memory

    # ---- writing

    def post_send(self, tag: int, data: memoryview, count: Count) -> None:
        header = memoryview(_HEADER.pack(tag, len(data)))
        if len(data):
            self._outgoing.append((header, None))
            self._outgoing.append((data, count))
        else:
            self._outgoing.append((header, count))

    @property
    def has_more(self) -> bool:
        return bool(self._outgoing)

    def write(self) -> None:
        """As much as the socket takes now. Raises OSError when the connection is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                self._sent(self.sock.sendmsg([view for view, _ in islice(self._outgoing, _WRITE_FRAMES)]))

    def _sent(self, sent: int) -> None:
        while sent:
            view, count = self._outgoing[0]
            if sent < len(view):
                self._outgoing[0] = (view[sent:], count)
                return
            sent -= len(view)
            self._outgoing.popleft()
            if count is not None:
                count.left -= 1

    def say_goodbye(self, blamed: int | None) -> None:
        """Best effort: impossible in the middle of a frame, and useless when the other side is gone."""
        if not self._outgoing:
            self._outgoing.append((memoryview(_HEADER.pack(_GOODBYE, 0 if blamed is None else blamed + 1)), None))
            self.write()

    # ---- reading

    def post_receive(self, tag: int, memory: memoryview, count: Count) -> None:
        early = self._early.get(tag)
        if early is None:
            self._posted.setdefault(tag, deque()).append(_Incoming(memory, count))
            return
        message = early.popleft()
        if not early:
            del self._early[tag]
        self._same_length(len(message.memory), len(memory))
        message.target, message.count = memory, count
        if message.whole:
            message.finish()

    @property
    def expects(self) -> bool:
        """Somebody waits for bytes that have not arrived."""
        return bool(self._posted) or (self._current is not None and self._current.count is not None)

    def read(self) -> int:
        """Take what has arrived, up to a limit; how many bytes. Raises OSError or Broken when no more can come."""
        taken = 0
        while (taken < _READ_BYTES or not self.drained) and not self.left:
            room = self._rest if self._current is not None else self._stage[self._staged :]
            try:
                count = self.sock.recv_into(room)
            except BlockingIOError:
                return taken
            if not count:
                raise ConnectionError("the other side is gone")
            taken += count
            if self._current is None:
                self._unpack(self._staged + count)
            else:
                self._rest = room[count:]
                if count == len(room):
                    self._finish()
            if count < len(room) and self.drained:
                break
        return taken

    @property
    def drained(self) -> bool:
        """Nothing is left that only we can know of: for the rest, the socket says when to come back."""
        return not isinstance(self.sock, SecureSocket) or self.sock.drained

    def _unpack(self, length: int) -> None:
        """Take the frames out of the first `length` bytes of the stage."""
        start = 0
        while length - start >= _HEADER.size and not self.left:
            tag, size = _HEADER.unpack_from(self._stage, start)
            start += _HEADER.size
            if tag == _GOODBYE:
                self._hear_goodbye(size)
                return
            self._current = self._begin(tag, size)
            here = min(size, length - start)
            self._current.memory[:here] = self._stage[start : start + here]
            start += here
            self._rest = self._current.memory[here:]
            if here < size:
                self._staged = 0
                return
            self._finish()
        self._staged = length - start
        self._stage[: self._staged] = self._stage[start:length]

    def _begin(self, tag: int, size: int) -> _Incoming:
        posted = self._posted.get(tag)
        if posted is not None:
            message = posted.popleft()
            if not posted:
                del self._posted[tag]
            self._same_length(size, len(message.memory))
            return message
        message = _Incoming(np.empty(size, np.uint8).data)
        self._early.setdefault(tag, deque()).append(message)
        return message

    def _finish(self) -> None:
        assert self._current is not None
        self._current.finish()
        self._current = None

    def _same_length(self, sent: int, expected: int) -> None:
        if sent != expected:
            what = f"worker {self.worker} sent {sent} bytes where {expected} were expected"
            why = "the workers do not run the same program on the same model"
            raise Broken(Loss(what, self.worker, why, out_of_step=True))

    def _hear_goodbye(self, blamed: int) -> None:
        self.left = True
        if blamed:
            what = f"worker {self.worker} lost its connection to worker {blamed - 1}"
            raise Broken(Loss(what, blamed - 1))
