# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay, as a table, and what is removed with the others: never a chunk that somebody needs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, save
from torch import Tensor

from unisono.checkpoint.chunks import plan_chunks
from unisono.checkpoint.listing import Summary, list_checkpoints, list_steps, newest_good, read_manifest
from unisono.checkpoint.manifest import encode_manifest, step_key
from unisono.checkpoint.parts import known_chunks, put_part, write_part
from unisono.checkpoint.reading import verify
from unisono.checkpoint.retention import Best, prune, retain
from unisono.checkpoint.specs import specs_of
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.core.errors import CheckpointNewer, UsageError


def rows(*steps: int, **loss: float) -> list[Summary]:
    return [Summary(step, metrics={"loss": loss[f"at{step}"]} if f"at{step}" in loss else {}) for step in steps]


@pytest.mark.parametrize(
    ("found", "rules", "gone"),
    [
        (rows(), {}, set()),
        (rows(1), {}, set()),
        (rows(3, 1, 2), {}, {1, 2}),
        (rows(1, 2, 3), {"keep_last": 2}, {1}),
        (rows(1, 2, 3), {"keep_last": 9}, set()),
        (rows(10, 20, 30, 40, 50), {"keep_every": 20}, {10, 30}),
        (rows(1, 2, 3, at1=0.1, at2=0.2, at3=0.3), {"best": Best("loss", "min")}, {2}),
        (rows(1, 2, 3, at1=0.1, at2=0.2, at3=0.3), {"best": Best("loss", "max", 2)}, {1}),
        (rows(1, 2, 3, at1=math.nan, at2=0.2), {"best": Best("loss", "min", 3)}, {1}),
        (rows(1, 2, 3, at1=0.2, at2=0.2), {"best": Best("loss", "min")}, {1}),
        (rows(1, 2, 3), {"best": Best("loss", "min")}, {1, 2}),
        ([*rows(1, 2), Summary(3, problem="damaged")], {}, {1}),
    ],
)
def test_which_checkpoints_go(found: list[Summary], rules: dict[str, object], gone: set[int]) -> None:
    assert retain(found, **rules) == gone  # type: ignore[arg-type]


@given(st.sets(st.integers(0, 50)), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_the_newest_never_goes(steps: set[int], keep_last: int, keep_every: int | None) -> None:
    gone = retain(rows(*steps), keep_last, keep_every)
    assert gone <= steps
    assert not gone & set(sorted(steps)[-keep_last:])


@pytest.mark.parametrize("rules", [{"keep_last": 0}, {"keep_every": 0}])
def test_rules_that_would_keep_nothing_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        retain(rows(1), **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss:min", Best("loss", "min")),
        ("accuracy:max:3", Best("accuracy", "max", 3)),
        ("val:loss:min", Best("val:loss", "min")),
        ("loss", None),
        ("loss:least", None),
        (":min", None),
        ("loss:min:0", None),
        ("3", None),
    ],
)
def test_the_best_is_written_in_one_word(text: str, best: Best | None) -> None:
    if best is None:
        with pytest.raises(UsageError):
            Best.parse(text)
    else:
        assert Best.parse(text) == best


def state(changing: float) -> dict[str, Tensor]:
    return {"model.frozen": torch.ones(600, 600), "optimizer.moving": torch.full((600, 600), changing)}


def test_pruning_keeps_what_the_others_need() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        save(store, step, state(step), known=known_chunks(newest_good(store), None))
    assert len(store.keys("chunks/")) == 4
    gone = prune(store, {1, 2})
    assert gone.steps == (1, 2)
    assert (gone.chunks, list_steps(store)) == (2, [3])
    assert verify(store, read_manifest(store, 3)) == []
    assert len(store.keys("chunks/")) == 2


def test_manifests_go_before_their_chunks() -> None:
    store = MemoryStore()
    save(store, 1, state(1))
    save(store, 2, state(2))
    store.calls.clear()
    prune(store, {1})
    deleted = [key for call, key in store.calls if call == "delete"]
    assert deleted[0] == step_key(1)
    assert all(key.startswith("chunks/") for key in deleted[1:])


def test_chunks_of_a_save_under_way_stay() -> None:
    """They have no manifest yet; their part protects them, and without --orphans so does that nobody named them."""
    store = MemoryStore()
    save(store, 1, state(1))
    save(store, 2, state(2))
    tensors = state(1)  # the values of step 1 again, whose checkpoint goes
    part = write_part(store, plan_chunks(specs_of(tensors)), tensors)
    put_part(store, 3, 0, 0, part)
    write_part(store, plan_chunks(specs_of(state(9))), state(9))
    before = set(store.keys("chunks/"))
    prune(store, {1})
    assert set(store.keys("chunks/")) == before


def test_orphans_go_when_asked_for() -> None:
    store = MemoryStore()
    save(store, 1, state(1))
    write_part(store, plan_chunks(specs_of(state(9))), state(9))
    assert prune(store, ()).chunks == 0
    assert prune(store, (), orphans=True).chunks == 1
    assert [row.problem for row in list_checkpoints(store)] == [""]


def test_a_checkpoint_of_a_later_version_stops_pruning_before_anything_is_removed() -> None:
    store = MemoryStore()
    save(store, 1, state(1))
    newer, _ = save(store, 2, state(2))
    document = unstamp(encode_manifest(newer), "it")[0]
    store.objects[step_key(2)] = stamp(document | {"version": 2})
    before = dict(store.objects)
    with pytest.raises(CheckpointNewer):
        prune(store, {1}, orphans=True)
    assert store.objects == before


def test_a_damaged_checkpoint_can_be_removed_and_holds_nothing() -> None:
    store = MemoryStore()
    save(store, 1, state(1))
    save(store, 2, state(2))
    store.objects[step_key(2)] = b"rubble"
    assert prune(store, {2}, orphans=True).chunks == 1
    assert verify(store, read_manifest(store, 1)) == []
