# SPDX-License-Identifier: Apache-2.0
"""The channel between supervisor and worker: whole events whatever the chunks, and an end when the other is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.events import KINDS, Event, Notice, StepSkipped, encode
from unisono.wire import messages
from unisono.wire.channel import FD_VARIABLE, Channel, LineReader

texts = st.text('a"\\\n\r\u2028é🎵{}', max_size=12)
times = st.floats(0, 2e9)
some_events = st.lists(
    st.builds(Notice, time_s=times, code=texts, text=texts)
    | st.builds(StepSkipped, time_s=times, step=st.integers(0, 9), because=texts),
    max_size=6,
)


def line(event: Event) -> bytes:
    return encode(event).encode() + b"\n"


def told(message: messages.Message) -> bytes:
    return messages.encode(message).encode() + b"\n"


@given(some_events, st.data())
def test_events_arrive_whole_and_in_order_however_the_bytes_are_cut(sent: list[Event], data: st.DataObject) -> None:
    stream = b"".join(map(line, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = LineReader()
    received: list[Event] = []
    for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[first:last])
    assert received == sent


def test_events_and_messages_share_the_line_and_are_told_apart() -> None:
    event, message = Notice(code="a", text="b"), messages.Formed(worker=3, generation=7)
    spoken = [event, message, event, message]
    stream = b"".join(line(item) if isinstance(item, Event) else told(item) for item in spoken)
    assert LineReader().feed(stream) == spoken
    assert not set(messages.KINDS) & set(KINDS), "a line must not be both"


ECHO = """
import signal, sys
from unisono.wire.channel import Channel
channel = Channel(int(sys.argv[1]))
channel.listen(channel.tell)
signal.pause()
"""


@pytest.mark.timeout(30)
def test_messages_come_down_whole_and_in_order_however_the_bytes_are_cut() -> None:
    spoken = [
        messages.Stop(worker=0, because="ü" * 9),
        messages.Depart(worker=0, because="\n"),
        messages.Proceed(worker=1, number=2),
    ]
    ours, theirs = socket.socketpair()
    with theirs:
        echo = subprocess.Popen(
            [sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True
        )
    reader, heard = LineReader(), list[object]()
    with ours:
        for byte in b"".join(map(told, spoken)):
            ours.sendall(bytes([byte]))
        while len(heard) < len(spoken):
            data = ours.recv(4096)
            assert data, "it ended before it said everything"
            heard += reader.feed(data)
    assert echo.wait(timeout=20) == -signal.SIGKILL
    assert heard == spoken


def test_an_event_is_given_once_and_only_when_its_line_has_ended() -> None:
    event = Notice(code="a", text="b")
    reader = LineReader()
    assert reader.feed(line(event)[:-1]) == []
    assert reader.feed(b"\n") == [event]
    assert reader.feed(b"") == []


def test_noise_between_events_is_dropped_and_does_not_swallow_the_next() -> None:
    one, two = Notice(code="a", text="1"), Notice(code="a", text="2")
    noise = b"\xff\xfe\n\n{}\n" + b'{"kind":"from_the_future"}\n'
    assert LineReader().feed(line(one) + noise + line(two)) == [one, two]


def test_events_of_several_threads_never_mix_in_one_line() -> None:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that one event takes several turns
    channel = Channel(theirs.detach())
    sent = {worker: [Notice(worker=worker, code="x", text="y" * 50_000) for _ in range(3)] for worker in range(4)}

    def speak(worker: int) -> None:
        for event in sent[worker]:
            channel.send(event)

    threads = [threading.Thread(target=speak, args=(worker,)) for worker in sent]
    for thread in threads:
        thread.start()
    left, received = sum(len(line(event)) for told in sent.values() for event in told), list[Event]()
    reader = LineReader()
    while left:
        data = ours.recv(4096)
        left -= len(data)
        received += reader.feed(data)
    for thread in threads:
        thread.join()
    ours.close()
    for worker, told in sent.items():
        assert [event for event in received if event.worker == worker] == told


WORKER = """
import os, signal, sys
from unisono.core.events import Notice
from unisono.wire.channel import FD_VARIABLE, Channel
channel = Channel(int(os.environ[FD_VARIABLE]))
child = os.fork()
if child == 0:
    signal.pause()
channel.send(Notice(code="child", text=str(child)))
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("channel.listen(print)\nsignal.pause()", id="while it computes"),
        pytest.param("while True:\n    channel.send(Notice(code='a', text='b'))", id="while it speaks"),
    ],
)
@pytest.mark.timeout(30)
def test_a_worker_and_its_children_end_when_the_supervisor_is_gone(then: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER.format(then=then)],
            env=os.environ | {FD_VARIABLE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    try:
        reader, told = LineReader(), list[Event]()
        while not told:
            data = ours.recv(4096)
            assert data, "the worker ended before it said anything"
            told += reader.feed(data)
        assert isinstance(told[0], Notice)
        child = os.pidfd_open(int(told[0].text))
        ours.close()
        assert worker.wait(timeout=20) == -signal.SIGKILL
        ended, _, _ = select.select([child], [], [], 20)
        os.close(child)
        assert ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
