# SPDX-License-Identifier: Apache-2.0
"""Work on vectors by several threads: cut where it changes no bit, done wholly, and what goes wrong is told."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.core import hands


@given(st.integers(0, 1 << 24), st.integers(0, 1 << 24), st.integers(1, 9))
def test_shares_are_all_of_it_in_order_and_begin_where_vector_instructions_do(
    start: int, length: int, most: int
) -> None:
    found = hands.shares(start, start + length, most)
    assert found[0][0] == start
    assert found[-1][1] == start + length
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert all((low - start) % 64 == 0 for low, _ in found)
    assert all(low < high for low, high in found) or not length
    assert len(found) <= min(most, 4)
    assert len(found) == 1 or max(high - low for low, high in found) >= 1 << 19


@pytest.mark.usefixtures("one_thread_each")  # as servers have: with more, the last elements of parts have other bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cut_work_comes_to_the_bits_of_one_piece(dtype: torch.dtype) -> None:
    length = 3_000_037
    one, other = (torch.randn(length, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    whole, cut = torch.empty_like(one), torch.empty_like(one)
    torch.add(one, other, alpha=-0.1, out=whole)
    parts = hands.shares(0, length, 4)
    assert len(parts) == 4
    hands.do(
        [
            lambda low=low, high=high: torch.add(one[low:high], other[low:high], alpha=-0.1, out=cut[low:high])
            for low, high in parts
        ]
    )
    assert torch.equal(whole, cut)


def test_all_are_done_at_once() -> None:
    meeting = threading.Barrier(3, timeout=10)
    hands.do([meeting.wait] * 3)  # each waits for the others
    hands.do([lambda: None])


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = []

    def fail() -> None:
        raise ValueError("a hand slipped")

    for jobs in ([fail, lambda: ended.append(1)], [lambda: ended.append(1), fail]):
        with pytest.raises(ValueError, match="slipped"):
            hands.do(jobs)
    assert ended == [1, 1]
    hands.do([lambda: ended.append(1)] * 2)  # they go on
    assert len(ended) == 4


def test_a_forked_process_has_hands_of_its_own() -> None:
    hands.do([lambda: None] * 2)
    child = os.fork()
    if not child:
        done: list[int] = []
        hands.do([lambda: done.append(1)] * 2)
        os._exit(len(done))
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        threading.Event().wait(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("it waits for threads that it does not have")
    assert os.waitstatus_to_exitcode(status) == 2
