# SPDX-License-Identifier: Apache-2.0
"""One connection of a formed generation: frames out of and into the memory of tensors.

A frame is a header (tag, bytes) and the bytes. Frames wait in order for the socket; incoming ones are read straight
into the tensor that was posted for their tag, or kept until one is. Where two share memory, the bytes of a large frame
go through its lane, piece by piece, and the socket carries only a note of each piece and of the room that is free
again; or, if they lie in an arena, they are shown where they are, and the note that comes back says that they were
read. Nothing blocks and nothing here locks: `mesh_pump` decides when to read and write, one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from array import array
from collections import deque
from itertools import islice, takewhile

import numpy as np

from unisono.comm.mesh_arena import Arenas, Seen
from unisono.comm.mesh_frames import Count, Incoming, Outgoing
from unisono.comm.mesh_loss import Broken, Loss
from unisono.comm.mesh_shared import Outlet
from unisono.comm.mesh_talk import Line
from unisono.comm.mesh_tls import SecureSocket
from unisono.comm.mesh_words import ARENA, GONE, GOODBYE, HEADER, HERE, PIECE, ROOM, SHOWN, TAKEN

_LANE_FROM_BYTES = 1 << 17  # smaller frames are not worth a note
_SHOW_FROM_BYTES = 1 << 18  # and smaller ones than these no waiting for the other side
_STAGE_BYTES = 1 << 15  # what is read at once while we do not know whose it is
_READ_BYTES = 8 << 20  # and in one visit: then it is the other links' turn
_WRITE_FRAMES = 64
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array("i").itemsize)


class Link:
    """`left` says that the other worker said goodbye and meant no harm: only those who need it are affected."""

    def __init__(self, line: Line, worker: int, arenas: Arenas) -> None:
        self.sock, self.worker, self._lanes, self._arenas = line.sock, worker, line.lanes, arenas
        self.left = False
        self.interest = 0  # what the pump has registered
        self._outlet = line.lanes.out if line.lanes else None
        self._inlet = line.lanes.in_ if line.lanes else None
        self._unsent = 0  # messages
        self._waiting: deque[Outgoing] = deque()  # in order; the first may wait for room in the lane
        self._stream: deque[tuple[memoryview, Count | None, int]] = deque()  # for the socket; a descriptor, or -1
        self._announced: set[int] = set()  # arenas that the other side knows
        self._ended = arenas.ended  # of our arenas, when the other side last heard of it
        self._showing: dict[int, Outgoing] = {}  # messages that the other side has not read yet
        self._shown = 0  # messages, ever
        self.seen, self._seen_count = Seen(), 0
        self._posted: dict[int, deque[Incoming]] = {}
        self._early: dict[int, deque[Incoming]] = {}
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._staged = 0  # bytes of an incomplete header at the start of the stage
        self._current: Incoming | None = None
        self._rest = memoryview(b"")  # of the current message's memory
        self._by_lane = False  # how the current message's bytes come
        self.heard_s = time.monotonic()  # when anything last came
        self.greeted = 0  # bytes that came and moved nothing
        self._part_bytes = 0  # of a record that is not whole, when we last looked

    def forget(self) -> None:
        """Close what this process has open, without a word; shared memory goes with the last who looks at it."""
        self.sock.close()
        self.seen.forget()
        self._lanes = self._outlet = self._inlet = None
        self._early, self._current = {}, None  # which may lie in the other side's memory
        self._waiting.clear()  # and in our own, which nobody will ask for again
        self._stream.clear()
        self._showing.clear()

    def withdraw(self, blamed: int | None) -> None:
        """From now on our tensors may change, whether the other side has read them or not."""
        if self._lanes is not None:
            self._lanes.withdraw(blamed)

    # ---- writing

    def post_send(self, tag: int, data: memoryview, count: Count) -> None:
        self._unsent += 1
        self._waiting.append(Outgoing(tag, data, count))

    @property
    def has_more(self) -> bool:
        """Somebody waits for a message to leave."""
        return self._unsent > 0

    @property
    def can_write(self) -> bool:
        """There is something for the socket, as far as we know."""
        if self._stream or (self._inlet is not None and self._inlet.taken):
            return True
        return bool(self._waiting) and (self._outlet is None or self._outlet.free > 0)

    @property
    def congested(self) -> bool:
        """The socket took less than there was; it shall say when it takes more."""
        return bool(self._stream)

    def write(self) -> None:
        """As much as the socket takes now. Raises OSError when the connection is gone."""
        with contextlib.suppress(BlockingIOError):
            self._return_room()
            while self._stream or self._line_up():
                self._sent(self._send())

    def greet(self) -> None:
        """Say that we are here, unless there is something else to say."""
        if not self._stream:
            self._say(HERE, 0)

    def _send(self) -> int:
        """What is next for the socket; a descriptor goes along with a word of its own."""
        view, _, descriptor = self._stream[0]
        if descriptor >= 0:
            assert isinstance(self.sock, socket.socket)
            try:
                return socket.send_fds(self.sock, [view], [descriptor])
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # too many are on their way between all processes: in a moment
                    raise BlockingIOError from None
                raise
        together = takewhile(lambda entry: entry[2] < 0, islice(self._stream, _WRITE_FRAMES))
        return self.sock.sendmsg([view for view, _, _ in together])

    def _line_up(self) -> bool:
        """Small frames, up to the next piece of a large one. False when there are none, or no room in the lane."""
        while self._waiting and len(self._stream) < _WRITE_FRAMES:
            message = self._waiting[0]
            if self._outlet is not None and len(message.rest) >= (1 if message.begun else _LANE_FROM_BYTES):
                if not message.begun and self._show(message):
                    continue
                self._put_piece(message, self._outlet)
                break
            self._waiting.popleft()
            self._say(message.tag, len(message.rest), None if message.rest else message.count)
            if message.rest:
                self._stream.append((message.rest, message.count, -1))
        return bool(self._stream)

    def _show(self, message: Outgoing) -> bool:
        """If it lies in an arena, let the other side read it there. It is ours again when that has happened."""
        address, length = np.asarray(message.rest).ctypes.data, len(message.rest)
        arena = self._arenas.find(address, length) if length >= _SHOW_FROM_BYTES else None
        if arena is None:
            return False
        if self._ended != self._arenas.ended:
            self._ended = self._arenas.ended
            for number in [number for number in self._announced if number not in self._arenas]:
                self._announced.remove(number)
                self._say(GONE, number)
        if arena.number not in self._announced:
            self._announced.add(arena.number)
            self._say(ARENA, arena.number, descriptor=arena.descriptor)
        self._say(message.tag, length)
        self._say(SHOWN, arena.place(address))
        self._showing[self._shown] = message  # which keeps its tensor, and so the arena
        self._shown += 1
        self._waiting.popleft()
        return True

    def _put_piece(self, message: Outgoing, outlet: Outlet) -> None:
        if not message.begun:
            self._say(message.tag, len(message.rest))
            message.begun = True
        if put := outlet.put(np.asarray(message.rest)):
            message.rest = message.rest[put:]
            self._say(PIECE, put, None if message.rest else message.count)
            if not message.rest:
                self._waiting.popleft()

    def _return_room(self) -> None:
        if self._inlet is not None and self._inlet.taken:
            self._say(ROOM, self._inlet.taken)
            self._inlet.taken = 0

    def _say(self, tag: int, size: int, count: Count | None = None, descriptor: int = -1) -> None:
        self._stream.append((memoryview(HEADER.pack(tag, size)), count, descriptor))

    def _sent(self, sent: int) -> None:
        while sent:
            view, count, _ = self._stream[0]
            if sent < len(view):
                self._stream[0] = (view[sent:], count, -1)
                return
            sent -= len(view)
            self._stream.popleft()
            if count is not None:
                self._done(count)

    def _done(self, count: Count) -> None:
        count.left -= 1
        self._unsent -= 1

    def say_goodbye(self, blamed: int | None) -> None:
        """Best effort: impossible while the socket is full, and useless when the other side is gone."""
        if not self._stream:
            self._say(GOODBYE, 0 if blamed is None else blamed + 1)
            self._sent(self._send())

    # ---- reading

    def post_receive(self, message: Incoming, tag: int) -> None:
        early = self._early.get(tag)
        if early is None:
            self._posted.setdefault(tag, deque()).append(message)
            return
        found = early.popleft()
        if not early:
            del self._early[tag]
        self._same_length(len(found.memory), len(message.memory))
        message.shown, message.place = found.shown, found.place
        if found.whole and message.borrows:
            message.stay(found.memory)
            message.finish()
            return
        here = len(message.memory) - (len(self._rest) if found is self._current else 0)
        np.copyto(np.asarray(message.memory[:here]), np.asarray(found.memory[:here]))
        if found.whole:
            self.give_back(message)
            message.finish()
        else:  # the rest of it comes straight to where it belongs
            self._current, self._rest = message, message.memory[here:]

    @property
    def expects(self) -> bool:
        """Somebody waits for bytes that have not arrived."""
        return bool(self._posted) or (self._current is not None and self._current.count is not None)

    def read(self) -> int:
        """Take what has arrived, up to a limit; how many bytes. Raises OSError or Broken when no more can come."""
        taken = 0
        while (taken < _READ_BYTES or not self.drained) and not self.left:
            inline = self._current is not None and not self._by_lane
            room = self._rest if inline else self._stage[self._staged :]
            try:
                count = self._receive(room)
            except BlockingIOError:
                return taken + self._hear_part()
            if not count:
                raise ConnectionError("the other side is gone")
            taken += count
            self.heard_s = time.monotonic()
            if inline:
                self._rest = room[count:]
                if count == len(room):
                    self._finish()
            else:
                self._unpack(self._staged + count)
            if count < len(room) and self.drained:
                break
        return taken

    def _hear_part(self) -> int:
        """Over a slow line a record takes its time; meanwhile the other side is not silent."""
        before = self._part_bytes
        self._part_bytes = self.sock.waiting_bytes if isinstance(self.sock, SecureSocket) else 0
        if self._part_bytes in (0, before):
            return 0
        self.heard_s = time.monotonic()
        return self._part_bytes

    def _receive(self, room: memoryview) -> int:
        if self._lanes is None:
            return self.sock.recv_into(room)
        assert isinstance(self.sock, socket.socket)
        count, words, _, _ = self.sock.recvmsg_into([room], _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC)
        for _, _, data in words:
            self.seen.handed.extend(array("i", data))
        return count

    @property
    def drained(self) -> bool:
        """Nothing is left that only we can know of: for the rest, the socket says when to come back."""
        return not isinstance(self.sock, SecureSocket) or self.sock.drained

    def _unpack(self, length: int) -> None:
        """Take the frames out of the first `length` bytes of the stage."""
        start = 0
        while length - start >= HEADER.size and not self.left:
            tag, size = HEADER.unpack_from(self._stage, start)
            start += HEADER.size
            if tag <= HERE:
                self._hear(tag, size)
                continue
            self._begin(tag, size)
            if self._by_lane:
                continue
            here = min(size, length - start)
            self._rest[:here] = self._stage[start : start + here]
            start += here
            self._rest = self._rest[here:]
            if here < size:
                self._staged = 0
                return
            self._finish()
        self._staged = length - start
        self._stage[: self._staged] = self._stage[start:length]

    def _begin(self, tag: int, size: int) -> None:
        if self._current is not None:
            raise self._nonsense("a frame inside a frame")
        posted = self._posted.get(tag)
        if posted is not None:
            message = posted.popleft()
            if not posted:
                del self._posted[tag]
            self._same_length(size, len(message.memory))
        else:
            try:
                message = Incoming(np.empty(size, np.uint8).data)
            except (MemoryError, ValueError):
                raise self._nonsense(f"a frame of {size} bytes") from None
            self._early.setdefault(tag, deque()).append(message)
        self._current, self._rest = message, message.memory
        self._by_lane = self._inlet is not None and size >= _LANE_FROM_BYTES

    def _finish(self) -> None:
        assert self._current is not None
        self._current.finish()
        self._current, self._by_lane = None, False

    def _hear(self, word: int, number: int) -> None:
        """What the two of us say to each other beside the frames."""
        try:
            if word == PIECE and self._by_lane and self._inlet is not None:
                self._inlet.take(number, np.asarray(self._rest))
                self._rest = self._rest[number:]
                if not self._rest:
                    self._finish()
                if self._inlet.enough:
                    self._hurry()
            elif word == ROOM and self._outlet is not None:
                self._outlet.give_back(number)
            elif word == ARENA and self._lanes is not None:
                self.seen.open(number)
            elif word == GONE:
                self.seen.close(number)
            elif word == SHOWN and self._by_lane:
                self._read_shown(number)
            elif word == TAKEN and number in self._showing:
                self._done(self._showing.pop(number).count)
            elif word == GOODBYE:
                self._hear_goodbye(number)
            elif word == HERE:
                self.greeted += HEADER.size
            else:
                raise ValueError("a word that means nothing here")
        except ValueError as error:
            raise self._nonsense(str(error)) from None

    def _read_shown(self, place: int) -> None:
        """If somebody has asked for it. Otherwise, or if he borrows, it stays where it is and the other side waits."""
        message = self._current
        assert message is not None
        there = self.seen.at(place, len(message.memory))
        message.place, message.shown, self._seen_count = place, self._seen_count, self._seen_count + 1
        if message.count is None or message.borrows:
            message.stay(there.data)
        else:
            np.copyto(np.asarray(message.memory), there)
            self.give_back(message)
        self._finish()

    def give_back(self, message: Incoming) -> None:
        """We have read what we were shown, if we were; unless the other side has given up meanwhile."""
        if message.shown < 0:
            return
        if why := self._lanes.withdrawn if self._lanes is not None else 1:
            raise Broken(Loss(f"worker {self.worker} has given this generation up", why - 2 if why > 1 else None))
        self._say(TAKEN, message.shown)

    def _hurry(self) -> None:
        """The other side could put more into the lane: tell it before we take the next piece."""
        waiting = bool(self._stream)
        self._return_room()
        if not waiting:
            with contextlib.suppress(OSError):  # whoever writes next finds out
                self._sent(self._send())

    def _nonsense(self, what: str) -> Broken:
        return Broken(Loss(f"the connection to worker {self.worker} carried nonsense", self.worker, what))

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
