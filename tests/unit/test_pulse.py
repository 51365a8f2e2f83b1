# SPDX-License-Identifier: Apache-2.0
"""A worker's pulse: what it does is told at once, not only when the first half second is over."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

from unisono.elastic.activity import Activity, Pulse, times_run_in, user_frame
from unisono.wire import messages as m


def test_the_first_word_comes_before_anything_can_keep_the_lock() -> None:
    told: list[m.Message] = []
    Pulse(3, Activity(), told.append).start()
    assert isinstance(told[0], m.Status)
    assert told[0].worker == 3


class Large:
    pass


def test_a_look_at_the_stack_keeps_nothing_of_it_alive() -> None:
    """What the main thread had in hand is free when it lets go of it, not when the collector comes by."""
    pulse, held = Pulse(0, Activity(), lambda _: None), []

    def work() -> None:
        tensor = Large()
        held.append(weakref.ref(tensor))
        look = threading.Thread(target=pulse.status)
        look.start()
        look.join()
        assert held[0]() is not None

    gc.collect()
    gc.disable()
    try:
        work()
        assert held[0]() is None
    finally:
        gc.enable()


RUBBISH = """
import gc, threading
from unisono.elastic.activity import Activity, Pulse

class Node: pass

def litter():  # only the collector can clear it away, and it asks for a lock of the interpreter's when it goes
    node = Node()
    node.itself, node.own = node, threading.local()
    node.own.value = 1

pulse = Pulse(7, Activity(), print)
gc.collect()
for _ in range(20):
    litter()
_ = [{} for _ in range(80)]
_ = None  # dictionaries to take up again: the next that Python must make anew is a frame, in the middle of the look
gc.set_threshold(1)
print(pulse.status().worker, gc.isenabled())
"""


def test_a_look_at_the_stack_does_not_stand_still_over_garbage() -> None:
    """In a process of its own: nothing, not even a time-out, would get a word in."""
    done = subprocess.run([sys.executable, "-c", RUBBISH], capture_output=True, text=True, timeout=30)
    assert done.stdout == "7 True\n", done.stderr


def test_a_kernel_that_does_not_count_how_often_a_thread_ran_says_nothing() -> None:
    """Not something that stays the same for ever, as if the thread stood still."""
    counted = "voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3\n"
    assert times_run_in(f"Name:\tpython\n{counted}") == counted
    assert times_run_in("Name:\tpython\nThreads:\t4\n") == ""


def test_a_frame_that_is_between_two_lines_is_named_without_one() -> None:
    frame: Any = SimpleNamespace(f_code=work_of_a_user.__code__, f_lineno=None, f_back=None)
    assert user_frame(frame).endswith("test_pulse.py:0, in work_of_a_user")


def work_of_a_user() -> None:
    return None
