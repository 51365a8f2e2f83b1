# SPDX-License-Identifier: Apache-2.0
"""A worker's pulse: what it does is told at once, not only when the first half second is over."""

from __future__ import annotations

from unisono.elastic.activity import Activity, Pulse
from unisono.wire import messages as m


def test_the_first_word_comes_before_anything_can_keep_the_lock() -> None:
    told: list[m.Message] = []
    Pulse(3, Activity(), told.append).start()
    assert isinstance(told[0], m.Status)
    assert told[0].worker == 3
