# SPDX-License-Identifier: Apache-2.0
"""The connections of one generation, and the waiting: whoever waits moves the bytes of all.

There is no background thread. The first thread to wait pumps all links; others who wait meanwhile sleep, and one of
them takes over when the pumping thread has what it came for. The lock is held while bytes move, never while waiting.
A generation that has failed stays failed: every later call raises the same loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch import uint8 as BYTES

from unisono.comm.mesh_arena import Arenas
from unisono.comm.mesh_frames import Count, Incoming
from unisono.comm.mesh_link import Link
from unisono.comm.mesh_loss import Broken, Loss
from unisono.comm.mesh_private import Extent
from unisono.comm.mesh_shared import Bytes
from unisono.comm.mesh_talk import Line
from unisono.comm.seam import Message

GREET_S = 0.5  # who waits says so: nobody can tell a cut cable from a neighbour that waits for somebody else
UNHEARD_S = 3 * GREET_S


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this process's memory; keeps the tensor alive."""
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be exchanged")
    return tensor.detach().reshape(-1).view(BYTES).numpy().data


class Exchange(Count):
    """The pending result of one `Pump.exchange`."""

    __slots__ = ("_pump",)

    def __init__(self, pump: Pump, left: int) -> None:
        super().__init__(left)
        self._pump = pump

    def wait(self) -> None:
        if self.left:
            self._pump.wait(self)


class Borrowing(Exchange):
    """Like `Exchange`; `rows` are what has come, some of it in the memory of other workers until it is given back."""

    __slots__ = ("_incoming", "_receives")

    def __init__(self, pump: Pump, receives: Sequence[tuple[Message, Link]]) -> None:
        super().__init__(pump, len(receives))
        self._receives = receives
        self._incoming = [Incoming(memory_of(message.tensor), self, borrows=True) for message, _ in receives]

    @property
    def messages(self) -> list[tuple[Link, Incoming]]:
        return [(link, message) for (_, link), message in zip(self._receives, self._incoming, strict=True)]

    @property
    def rows(self) -> list[Tensor]:
        """After `wait`; to be read only."""
        return [
            tensor_at(coming.memory, message.tensor) if coming.elsewhere and len(coming.memory) else message.tensor
            for (message, _), coming in zip(self._receives, self._incoming, strict=True)
        ]

    @property
    def kept(self) -> list[Tensor | None]:
        """After `wait`, and before it is given back."""
        return [
            as_tensor(link.seen.private_at(coming.place, len(coming.memory)), message.tensor)
            for (message, link), coming in zip(self._receives, self._incoming, strict=True)
        ]

    def give_back(self, at_once: bool = False) -> None:
        self._pump.give_back(self, at_once)


def as_tensor(memory: Bytes | None, like: Tensor) -> Tensor | None:
    """On this memory, which lives as long as the tensor."""
    return None if memory is None else torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def tensor_at(memory: memoryview, like: Tensor) -> Tensor:
    """A tensor on somebody else's memory. The caller keeps it alive, and writes nothing: the system would not let him.

    By its address: torch complains of memory that it cannot write to.
    """
    array = np.asarray(memory)
    view = (ctypes.c_byte * len(memory)).from_address(array.ctypes.data)
    return torch.frombuffer(view, dtype=like.dtype).view(like.shape)


def _broke(link: Link, error: OSError) -> Loss:
    return Loss(f"the connection to worker {link.worker} broke", link.worker, str(error))


class Pump:
    """`lines` by rank, `workers` the ids of all ranks."""

    def __init__(
        self,
        generation: int,
        own: int = 0,
        lines: Mapping[int, Line] | None = None,
        workers: Sequence[int] = (),
        patience_s: float = 1800.0,
        arenas: Arenas | None = None,
    ) -> None:
        self.generation = generation
        self._own, self._patience_s = own, patience_s
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._loss: Loss | None = None
        self.served = 0  # how often bytes came or went: whoever looks from outside sees that something moves
        self._pumping = self._retired = self._dropped = False
        self._pumping_since_s = 0.0
        self._left: list[Link] = []
        self._sleeping = 0  # threads that wait while another pumps
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        known = arenas or Arenas(enabled=False)
        self._links = {rank: Link(line, workers[rank], known) for rank, line in (lines or {}).items()}
        self._near = {rank for rank, line in (lines or {}).items() if line.lanes is not None}
        self._by_descriptor = {link.sock.fileno(): link for link in self._links.values()}
        with self._lock:
            for descriptor, link in self._by_descriptor.items():
                link.interest = select.EPOLLIN
                self._epoll.register(descriptor, link.interest)
                self._read(link)  # TLS may have read on past the hello

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Exchange:
        """Post everything, and send what the sockets take at once."""
        self._raise_loss()  # a generation that was never formed has no links
        pending = Exchange(self, len(sends) + len(receives))
        outgoing = [(self._links[message.peer], memory_of(message.tensor)) for message in sends]
        incoming = [(self._links[message.peer], memory_of(message.tensor)) for message in receives]
        with self._lock:
            self._raise_loss()
            for link, memory in incoming:
                self._post(link, Incoming(memory, pending), tag)
            for link, memory in outgoing:
                link.post_send(tag, memory, pending)
            for link in dict.fromkeys(link for link, _ in (*outgoing, *incoming)):
                if link.can_write:
                    self._write(link)
            self._miss_those_who_left()
        return pending

    def borrow(self, receives: Sequence[Message], tag: int) -> Borrowing:
        """Like `exchange` without sends, but what others show is not copied: whoever asked gives it back."""
        self._raise_loss()
        pending = Borrowing(self, [(message, self._links[message.peer]) for message in receives])
        with self._lock:
            self._raise_loss()
            for link, message in pending.messages:
                self._post(link, message, tag)
            self._miss_those_who_left()
        return pending

    def extent(self, address: int, length: int) -> Extent | None:
        """Which part of whose memory is kept there."""
        found = (link.seen.extent(address, length) for link in self._links.values())
        return next((extent for extent in found if extent is not None), None)

    def give_back(self, pending: Borrowing, at_once: bool = False) -> None:
        """Raises the loss if a lender has changed its mind meanwhile: what was read may then be anything."""
        with self._lock:
            self._raise_loss()
            for link, message in pending.messages:
                try:
                    link.give_back(message)
                except Broken as broken:
                    self._lose(self._as_seen_here(broken.loss, link))
            self._raise_loss()
            for link in dict.fromkeys(link for link, _ in pending.messages) if at_once else ():
                if link.can_write:
                    self._write(link)

    def wait(self, pending: Count) -> None:
        deadline = time.monotonic() + self._patience_s
        with self._lock:
            while pending.left:
                self._raise_loss()
                if not self._pumping:
                    self._pump(pending, deadline)
                    continue
                self._sleeping += 1
                try:
                    self._change.wait(max(0.0, deadline - time.monotonic()))
                finally:
                    self._sleeping -= 1
                if time.monotonic() >= deadline:
                    self._lose(self._silence())

    def fail(self, loss: Loss) -> None:
        """From any thread: end every wait. The first loss counts."""
        with self._lock:
            self._lose(loss)
            self._withdraw()

    def missing(self) -> list[int]:
        """From any thread: the workers from whom something is awaited, or who have not taken what is for them."""
        with self._lock:
            if self._loss is not None:  # nobody waits for anything any more
                return []
            return [link.worker for link in self._links.values() if link.expects or link.has_more]

    def unheard(self) -> list[int]:
        """From any thread that finds another waiting here: the workers from whom not even a greeting comes."""
        with self._lock:
            since_s = max(time.monotonic() - UNHEARD_S, 0.0)
            if self._loss is not None or not self._pumping or self._pumping_since_s > since_s:
                return []
            return sorted(link.worker for link in self._links.values() if link.heard_s < since_s and not link.left)

    def drop(self) -> None:
        """For tests of faults: neither read nor write any more, as if the cable were cut."""
        with self._lock:
            self._dropped = True
            for link in self._links.values():
                if link.interest and not self._retired:
                    self._epoll.unregister(link.sock.fileno())
                link.interest = 0

    def retire(self) -> None:
        """Leave the generation: tell the others, end every wait here, close the connections."""
        with self._lock:
            if self._retired:
                return
            blamed = self._loss.worker if self._loss else None
            self._lose(Loss(f"generation {self.generation} was left behind"))
            self._withdraw()
            for link in self._links.values():
                if link.interest:
                    with contextlib.suppress(OSError):
                        link.say_goodbye(blamed)
            self._retired = True
            if not self._pumping:
                self.forget()

    def forget(self) -> None:
        """Close what this process has open, without a word and without a lock."""
        self._retired = True
        self._loss = self._loss or Loss(f"generation {self.generation} does not belong to this process")
        for link in self._links.values():
            link.forget()
        self._epoll.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---- all below with the lock held

    def _post(self, link: Link, message: Incoming, tag: int) -> None:
        try:
            link.post_receive(message, tag)
        except Broken as broken:
            self._lose(self._as_seen_here(broken.loss, link))

    def _raise_loss(self) -> None:
        if self._loss is not None:
            raise self._loss.error()

    def _lose(self, loss: Loss) -> None:
        if self._loss is None:
            self._loss = loss
            if not loss.out_of_step:  # then all stay where they are, until somebody has seen who is elsewhere
                self._withdraw()
            os.eventfd_write(self._wake, 1)
            self._change.notify_all()

    def _withdraw(self) -> None:
        """From now on our tensors may change: whoever reads them where they are shall know."""
        assert self._loss is not None
        for link in self._links.values():
            link.withdraw(self._loss.worker)

    def _pump(self, pending: Count, deadline: float) -> None:
        """Move bytes until `pending` is complete or the generation is lost."""
        self._pumping, self._pumping_since_s = True, time.monotonic()
        greeted_s = self._pumping_since_s
        try:
            for link in self._links.values():  # what was given back
                if link.can_write and not link.interest & select.EPOLLOUT:
                    self._write(link)
            while pending.left and self._loss is None:
                self._lock.release()
                try:
                    ready = self._epoll.poll(max(0.0, min(GREET_S, deadline - time.monotonic())))
                finally:
                    self._lock.acquire()
                now_s = time.monotonic()
                if not ready and now_s >= deadline:
                    self._lose(self._silence())
                if now_s - greeted_s >= GREET_S:
                    greeted_s = now_s
                    self._greet()
                for descriptor, events in ready:
                    if descriptor == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(descriptor)
                    elif not self._dropped and self._loss is None:  # a lost generation's tensors are others' already
                        self._serve(self._by_descriptor[descriptor], events)
                if self._sleeping:
                    self._change.notify_all()
        finally:
            self._pumping = False
            if self._retired:
                self.forget()
            if self._sleeping:
                self._change.notify_all()

    def _greet(self) -> None:
        for link in self._links.values():
            link.greet()
            self._write(link)

    def _serve(self, link: Link, events: int) -> None:
        greeted = link.greeted
        taken = self._read(link) if events & ~select.EPOLLOUT else 0
        if events & select.EPOLLOUT or taken > link.greeted - greeted:
            self.served += 1
        if link.can_write:
            self._write(link)

    def _read(self, link: Link) -> int:
        taken = 0
        try:
            taken = link.read()
        except Broken as broken:
            self._lose(self._as_seen_here(broken.loss, link))
        except OSError as error:
            self._lose(_broke(link, error))
        if link.left:
            self._unlink(link)
        return taken

    def _write(self, link: Link) -> None:
        if self._dropped or not link.interest or self._loss is not None:
            return
        try:
            link.write()
        except OSError as error:
            while self._read(link) and not link.left:  # its last words, if any, say more than our broken pipe
                pass
            if not link.left:
                self._lose(_broke(link, error))
            return
        interest = select.EPOLLIN | (select.EPOLLOUT if link.congested else 0)
        if interest != link.interest:
            link.interest = interest
            self._epoll.modify(link.sock.fileno(), interest)

    def _unlink(self, link: Link) -> None:
        """Its end has come; a closed connection would always be ready to read."""
        if link.interest:
            self._epoll.unregister(link.sock.fileno())
            link.interest = 0
        self._left.append(link)
        self._miss_those_who_left()

    def _miss_those_who_left(self) -> None:
        for link in self._left:
            if link.expects or link.has_more:
                what = f"worker {link.worker} has left generation {self.generation}"
                self._lose(Loss(what, link.worker, "its script ended, or it stopped before the others"))

    def _as_seen_here(self, loss: Loss, link: Link) -> Loss:
        """Whoever says that it lost us is the one that we have lost."""
        return Loss(f"the connection to worker {link.worker} broke", link.worker) if loss.worker == self._own else loss

    def _silence(self) -> Loss:
        late = next((link for link in self._links.values() if link.expects or link.has_more), None)
        who = f"worker {late.worker}" if late else "any worker"
        return Loss(f"nothing was heard of {who} for {self._patience_s:g} s", late.worker if late else None)
