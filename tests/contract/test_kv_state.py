# SPDX-License-Identifier: Apache-2.0
"""What a key-value store has learnt, taken from its servers and given to other ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from key_values import served
from torch import Tensor

from unisono.core.errors import CheckpointMismatch
from unisono.parallel.kv import KeyValues
from unisono.parallel.kv_shard import OPTIMIZERS
from unisono.parallel.kv_state import StoreState, dealt_out, gathered

pytestmark = pytest.mark.usefixtures("one_thread_each")

BIG = 300_000  # cut over all servers
KEYS: list[str | int] = ["big", 7]


def pushed(step: int) -> list[Tensor]:
    seeded = torch.Generator().manual_seed(step)
    return [torch.randn(BIG, generator=seeded), torch.randn(3, 2, generator=seeded)]


def opened(kv: KeyValues, name: str) -> None:
    kv.init(KEYS, [torch.ones(BIG), torch.ones(3, 2)])
    kv.set_optimizer(name)


def steps(kv: KeyValues, first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        kv.push(KEYS, pushed(step))
    return kv.pull(KEYS)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_store_goes_on_with_another_number_of_servers_as_if_nothing_had_been(name: str) -> None:
    def whole(kv: KeyValues) -> list[Tensor]:
        opened(kv, name)
        return steps(kv, 0, 5)

    def first(kv: KeyValues) -> StoreState:
        opened(kv, name)
        steps(kv, 0, 3)
        return gathered(kv)

    def second(state: StoreState, kv: KeyValues) -> list[Tensor]:
        opened(kv, name)
        dealt_out(kv, state)
        return steps(kv, 3, 5)

    expected = served("threads", 1, 1, whole)[0]
    state = served("threads", 1, 2, first)[0]
    assert state.tensors['values."big"'].shape == (BIG,)
    found = served("threads", 1, 3, partial(second, state))[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused_with_what_to_do() -> None:
    def use(kv: KeyValues) -> list[Any]:
        kv.init("w", torch.zeros(4))
        kv.set_optimizer("Adam", lr=0.1)
        kv.push("w", torch.ones(4))
        state, errors = gathered(kv), []
        for tensors, facts, optimizer in (
            (state.tensors, {"kvstore": {}}, "Adam"),
            ({**state.tensors, 'values."w"': torch.zeros(5)}, state.facts, "Adam"),
            (state.tensors, state.facts, "SGD"),
        ):
            kv.set_optimizer(optimizer, lr=0.1)
            with pytest.raises(CheckpointMismatch) as caught:
                dealt_out(kv, StoreState(tensors, facts))
            errors.append(str(caught.value))
        return errors

    keys, shape, optimizer = served("threads", 1, 1, use)[0]
    assert "of no store" in keys
    assert "(5,)" in shape
    assert 'set_optimizer("Adam", ...)' in optimizer
