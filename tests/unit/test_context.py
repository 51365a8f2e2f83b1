# SPDX-License-Identifier: Apache-2.0
"""What is asked before a sequence is dealt out over ranks."""

from __future__ import annotations

import pytest

from unisono.core.errors import SetupError
from unisono.parallel.context import check_context


def test_a_sequence_that_fills_two_pieces_for_each_rank_is_taken() -> None:
    check_context(4096, 4, "cuda")


@pytest.mark.parametrize(
    ("length", "ways", "device", "says"),
    [
        (4096, 2, "cpu", "no sharding rule for the attention of CPUs"),
        (20, 4, "cuda", "20 / 8 = 2.5 positions a piece"),
        (20, 4, "cuda", "pad sequences to 24"),
    ],
)
def test_what_cannot_work_is_said_with_its_arithmetic(length: int, ways: int, device: str, says: str) -> None:
    with pytest.raises(SetupError) as caught:
        check_context(length, ways, device)
    assert says in str(caught.value)
