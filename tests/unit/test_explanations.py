# SPDX-License-Identifier: Apache-2.0
"""The words for what went wrong in a worker: memory, loader processes, lines of code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from unisono.core import process, stacks
from unisono.core.errors import ScriptFailed, UnisonoError, WorkerLost
from unisono.data.loader_failures import Failure, explain_death, failure_of, raise_here


@pytest.mark.parametrize(
    ("described", "is_about_memory"),
    [
        ("MemoryError", True),
        ("MemoryError: Unable to allocate 8.00 GiB for an array with shape (1073741824,)", True),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried",
            True,
        ),
        ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
        ("ValueError: this card game is out of memory cards", False),
        ("RuntimeError", False),
    ],
)
def test_an_exception_that_says_that_memory_ran_out_is_explained(described: str, is_about_memory: bool) -> None:
    error = process.out_of_memory(described, "train.py:3")
    assert (error is not None) == is_about_memory
    if error is not None:
        assert error.what == f"out of memory: {described}"
        assert error.where == "train.py:3"
        assert "smaller batch" in error.do


def test_a_device_that_fails_otherwise_is_not_said_to_be_out_of_memory() -> None:
    error = process.out_of_memory("AcceleratorError: CUDA error: an illegal memory access was encountered", "x.py:1")
    assert error is not None
    assert error.what.startswith("AcceleratorError: CUDA error")
    full = process.out_of_memory("AcceleratorError: CUDA error: out of memory", "x.py:1")
    assert full is not None
    assert full.what.startswith("out of memory: AcceleratorError")


def failing_dataset(error: Exception) -> Failure:
    try:
        raise error
    except type(error) as raised:
        return failure_of(raised, list(range(3, 20)))


@pytest.mark.parametrize(
    ("error", "kind", "what"),
    [
        (KeyError("label"), ScriptFailed, "KeyError: 'label'"),
        (MemoryError(), WorkerLost, "out of memory: MemoryError"),
    ],
)
def test_an_exception_in_a_loader_process_arrives_with_its_line_and_samples(
    error: Exception, kind: type[UnisonoError], what: str
) -> None:
    with pytest.raises(kind) as caught:
        raise_here(failing_dataset(error))
    assert caught.value.what == what
    assert f"{Path(__file__)}:" in caught.value.where
    assert ", in failing_dataset: raise error" in caught.value.where
    assert type(error).__name__ in caught.value.trace
    if kind is ScriptFailed:
        assert "in a loader process, while reading samples 3, 4, 5, 6, 7, 8, 9, 10, …" in caught.value.cause


def test_a_loader_process_that_died_is_recognised_wherever_it_is_told() -> None:
    told = RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. \nmore")
    behind = ValueError("consequence")
    behind.__context__ = told
    for error in (told, behind):
        death = explain_death(error)
        assert death is not None
        assert (death.what, death.cause) == (
            "a loader process died",
            "DataLoader worker (pid 12) is killed by signal: Killed. ",
        )
    assert explain_death(ConnectionError("of the user's own")) is None


def test_a_line_is_named_in_one_way_and_a_long_one_is_cut(tmp_path: Path) -> None:
    here = inspect.currentframe()
    assert here is not None
    number = here.f_lineno
    line = process.line_at(__file__, number, "f")
    assert line == f"{__file__}:{number}, in f: number = here.f_lineno"
    long = tmp_path / "long.py"
    long.write_text("x" * 300)
    assert process.line_at(str(long), 1, "f").endswith("x …")
    assert process.line_at("gone.py", 3, "f") == "gone.py:3, in f"


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "{users}", line 1 in waiting

Current thread 0x00007f0000000002 (most recent call first):
  File "{library}", line 519 in string_at
  File "{users}", line 2 in crash

Thread 0x00007f0000000003 (most recent call first):
  File "{users}", line 3 in main
"""


def test_a_crash_is_where_the_crashing_thread_was_and_a_stack_where_the_main_thread_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("wait()\ncrash()\nfit()\n")
    text = CRASH.format(users=script, library=inspect.__file__)
    assert stacks.crash_line(text) == f"{script}:2, in crash: crash()"
    assert stacks.user_line(text) == f"{script}:3, in main: fit()"
    assert stacks.crash_line("nothing of the kind") == ""
    native = text.replace("Current thread", "Thread")
    assert stacks.crash_line(native) == f"a thread of native code, while the script was in {script}:3, in main: fit()"
