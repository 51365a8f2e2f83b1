# SPDX-License-Identifier: Apache-2.0
"""Without waiting, buckets leave as the backward pass completes them, unless something needs the whole gradient."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from racing_rounds import MICROBATCHES, ROWS, TURNS, WAYS, Replica, assert_counted_once, lives, sized
from torch import Tensor

from unisono.comm.asking import Words
from unisono.comm.codecs import parse_codec
from unisono.parallel.owner import PART, PUSH, Owner
from unisono.parallel.slices import Place
from unisono.train.numerics import Clip

pytestmark = pytest.mark.usefixtures("one_thread_each")

BY_BUCKETS = pytest.mark.parametrize("way", [way for way in WAYS if "by_buckets" in WAYS[way]])


@BY_BUCKETS
@pytest.mark.parametrize("servers", [1, 2])
def test_a_bucket_is_updated_while_the_next_is_still_computed(
    servers: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership, updated, see = sized(1, servers), threading.Event(), Owner._see
    found: list[bool] = []

    def noted(owner: Owner, places: Sequence[Place], words: Words) -> Any:
        seen = see(owner, places, words)
        updated.set()
        return seen

    def compute(replica: Replica, step: int, index: int) -> Tensor:
        updated.clear()
        column, is_last = step * MICROBATCHES + index, index == MICROBATCHES - 1
        first, *others = replica.model.parts
        slow = first[:, column] * 1.0  # made first, so its gradient comes last
        slow.register_hook(lambda _: found.append(updated.wait(10 if is_last else 0)))
        return -sum((part[:, column].sum().float() for part in others), slow.sum().float())

    def life(replica: Replica) -> Tensor:
        replica.compute = lambda step, index: compute(replica, step, index)  # type: ignore[method-assign]
        replica.round(membership)
        return replica.model.weight.detach().clone()

    monkeypatch.setattr(Owner, "_see", noted)
    for weight in lives(membership, life, None, **WAYS[way]):
        assert_counted_once(weight)
    assert found == [False, False, False, True] * TURNS, "the last microbatch of a piece completes its buckets"


NEED_ALL: Mapping[str, Mapping[str, Any]] = {
    "clipping": {"clip": Clip(norm=1e9)},
    "something unknown": {"before_update": lambda: None},
    "a codec": {"compression": parse_codec("fp16")},
    "a correction of what is late": {"delayed": "compensate"},
}


def kinds_of_messages(workers: int, servers: int, **options: Any) -> Counter[int]:
    """What workers told owners, by kind."""
    membership, told, lock = sized(workers, servers), Counter[int](), threading.Lock()

    def life(replica: Replica) -> Tensor:
        begin = replica.strategy._begin_asking

        def ask(rank: int, words: Words) -> Callable[[], Words]:
            with lock:
                told[words.what] += 1
            return begin(rank, words)

        replica.strategy._begin_asking = ask  # type: ignore[method-assign]
        replica.round(membership)
        return replica.model.weight.detach().clone()

    for weight in lives(membership, life, None, **options):
        assert_counted_once(weight)
    return told


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_every_bucket_but_the_last_has_a_message_of_its_own(servers: int) -> None:
    told = kinds_of_messages(2, servers, by_buckets=True)
    owners = servers or 2
    assert (told[PART], told[PUSH]) == (2 * 2 * TURNS * owners, 2 * TURNS * owners)


@pytest.mark.parametrize("why", NEED_ALL)
def test_where_the_gradient_as_a_whole_is_needed_nothing_leaves_before(why: str) -> None:
    told = kinds_of_messages(2, 1, by_buckets=True, **NEED_ALL[why])
    assert (told[PART], told[PUSH]) == (0, 2 * TURNS)


@BY_BUCKETS
@pytest.mark.parametrize("bad", [0, 1])
def test_of_a_piece_whose_loss_is_not_finite_nothing_leaves(bad: int, way: str) -> None:
    """Whichever of its two microbatches it was."""
    membership = sized(2, 1)

    def life(replica: Replica) -> Tensor:
        replica.strategy.skips, compute = True, replica.compute

        def spoilt(step: int, index: int) -> Tensor:
            return compute(step, index) * (float("nan") if (step, index) == (1, bad) else 1.0)

        replica.compute = spoilt  # type: ignore[method-assign]
        replica.round(membership)
        return replica.model.seen()

    for seen in lives(membership, life, None, **WAYS[way]):
        left_out = (seen == 0).nonzero().tolist()
        assert left_out == [[1, 0], [1, 1]]
        assert int(seen.sum()) == ROWS * (TURNS * MICROBATCHES - 2)
