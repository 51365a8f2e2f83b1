# SPDX-License-Identifier: Apache-2.0
"""Workers that save together: who writes what, what is told with a step, and what happens when somebody cannot."""

from __future__ import annotations

import pytest
from memory_store import MemoryStore
from saving_teams import Team

from unisono.checkpoint.listing import list_steps, newest_good
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.store import Data
from unisono.core import events
from unisono.core.errors import StoreFailed
from unisono.core.interval import Interval


def test_each_writes_its_share_of_one_checkpoint_and_the_first_commits_it() -> None:
    store = MemoryStore()
    team = Team([store, store, store], Interval(steps=3))
    for _ in range(5):
        team.do_step()
    assert list_steps(store) == [3]
    manifest = newest_good(store)
    assert manifest is not None
    assert all((tensor == 3 + int(name[-1])).all() for name, tensor in read_tensors(store, manifest))
    assert [event.writers for event in team.of(events.CheckpointSaved)] == [[0, 1, 2]]
    assert {each.saved_step for each in team.checkpoints} == {3}
    assert not store.keys("parts/")


def test_what_one_worker_asks_for_is_saved_by_all_and_the_end_saves_the_rest() -> None:
    store = MemoryStore()
    team = Team([store, store], Interval(seconds=1000))
    team.do_step()
    team.checkpoints[1].asked = True
    team.do_step()
    team.do_step()
    assert list_steps(store) == [2]
    team.finish()
    assert list_steps(store) == [2, 3]
    team.finish()
    assert len(team.of(events.CheckpointSaved)) == 2, "what is saved is not saved again"


def test_never_is_never_and_old_ones_go() -> None:
    store = MemoryStore()
    team = Team([store], Interval())
    team.do_step()
    team.finish()
    assert list_steps(store) == []
    team = Team([store], Interval(steps=1), keep=2)
    for _ in range(8):
        team.do_step()
    team.finish()
    assert len(list_steps(store)) == 2
    assert list_steps(store)[-1] == 8


def test_a_worker_that_does_not_see_the_place_lets_the_others_write() -> None:
    store, elsewhere = MemoryStore(), MemoryStore()
    store.put("store.json", b"ab" * 16)
    elsewhere.put("store.json", b"cd" * 16)
    team = Team([None, store, elsewhere, store], Interval(steps=2))
    for _ in range(4):
        team.do_step()
    assert list_steps(store) == [2, 4]
    assert list_steps(elsewhere) == []
    assert [event.writers for event in team.of(events.CheckpointSaved)] == [[1, 3], [1, 3]]
    assert newest_good(store) is not None


class Failing(MemoryStore):
    fails = True

    def put(self, key: str, data: Data) -> None:
        if self.fails and key.startswith("chunks/"):
            raise StoreFailed(f"cannot write {key}")
        super().put(key, data)


def test_one_that_cannot_write_is_told_to_all_and_the_next_save_may_succeed() -> None:
    store = Failing()
    store.put("store.json", b"ab" * 16)
    good = MemoryStore()
    good.objects = store.objects  # the same place, seen by one with and by one without trouble
    team = Team([good, store], Interval(steps=2))
    team.do_step()
    team.do_step(settle=False)
    team.checkpoints[1]._save.wait()  # type: ignore[union-attr]
    team.do_step(settle=False)
    assert [each._save for each in team.checkpoints] == [None, None]
    (failed,) = team.of(events.CheckpointFailed)
    assert (failed.step, failed.failure["code"]) == (2, "UNI-3010")
    assert list_steps(good) == []
    store.fails = False
    team.do_step()
    team.do_step()
    assert list_steps(good) == [4]
    assert team.checkpoints[1].failure is None


def test_a_save_whose_writer_is_lost_is_taken_again_by_those_who_are_left() -> None:
    store = MemoryStore()
    team = Team([store, store], Interval(steps=2))
    team.do_step()
    team.checkpoints[1].store = None  # it dies before it has written anything
    team.checkpoints[1].after_step = lambda *_: None  # type: ignore[method-assign]
    rows = [each.riders(2, worker == 0) for worker, each in enumerate(team.checkpoints)]
    alone = team.checkpoints[0]
    team.step += 1
    alone._meet = lambda *_: ([0, 1], 1)  # type: ignore[method-assign]
    alone.after_step(2, rows, [0, 1], team.comms[0], False, True)
    assert alone._save is not None
    alone.regroup([0])
    assert alone._save is None
    assert alone.asked
    assert list_steps(store) == []


def test_steps_that_are_taken_back_take_their_checkpoints_along() -> None:
    store = MemoryStore()
    team = Team([store], Interval(steps=2), keep=9)
    for _ in range(7):
        team.do_step()
    assert list_steps(store) == [2, 4, 6]
    team.checkpoints[0].take_back(3)
    assert list_steps(store) == [2]
    team.checkpoints[0].take_back(3)
    assert list_steps(store) == [2]


@pytest.mark.parametrize(("text", "due"), [("3", [3, 6, 9]), ("never", []), ("1", list(range(1, 10)))])
def test_intervals_of_steps(text: str, due: list[int]) -> None:
    from unisono.core.interval import parse_interval

    interval = parse_interval(text, "--checkpoint-every")
    assert [step for step in range(1, 10) if interval.is_due(step, 0.0)] == due
