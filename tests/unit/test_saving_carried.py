# SPDX-License-Identifier: Apache-2.0
"""State that belongs to microbatches in checkpoints: each holder writes its own, any number of workers takes it up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from memory_store import MemoryStore
from saving_teams import CarryingTeam, M, Team, after, fresh, same

from unisono.checkpoint.listing import list_steps, newest_good, read_manifest
from unisono.checkpoint.reading import read_tensors, verify
from unisono.comm.threads import Hub, ThreadComm
from unisono.core import events
from unisono.core.errors import CheckpointMismatch, StoreFailed
from unisono.core.interval import Interval
from unisono.core.spec import JobSpec
from unisono.parallel.carried import NOTHING, Carried
from unisono.train.resuming import Home, carried_in

SPEC = JobSpec(microbatches=M, batch_size=M, seed=0, threads=1)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_carried_state_saved_by_three_is_taken_up_by_any_number(workers: int) -> None:
    store = MemoryStore()
    team = CarryingTeam([store] * 3, Interval(steps=3), 3)
    for _ in range(4):
        team.do_step()
    manifest = newest_good(store)
    assert manifest is not None
    assert manifest.step == 3
    assert verify(store, manifest) == []
    stored = [name for name in manifest.tensors if name.startswith("carried.")]
    assert len(stored) == 3 * M

    again = CarryingTeam([store] * workers, Interval(steps=3), workers)
    for carried in again.carried[:-1] if workers > 1 else again.carried:  # one does not see the place
        read, words = carried_in(Home(store), manifest, carried, SPEC)
        assert read is not None
        assert not words
        carried.begin_from(manifest.step, read)
    reads = len([call for call in store.calls if call[0] == "get"])
    again.form(*range(workers))
    for carried in again.carried:
        assert all(same(state, after(microbatch, 3)) for microbatch, state in carried.mine.items())
    assert len([call for call in store.calls if call[0] == "get"]) - reads <= 2 * M, "each state is read once"
    again.step = 3
    again.update()
    assert same(again.carried[0][0], after(0, 4))


def test_the_same_state_is_stored_in_the_same_chunks_whoever_holds_it() -> None:
    manifests = []
    for workers in (1, 2, 4):
        store = MemoryStore()
        team = CarryingTeam([store] * workers, Interval(steps=2), workers)
        team.do_step()
        team.do_step()
        manifests.append(newest_good(store))
    assert manifests[0] is not None
    assert all(each is not None and each.tensors == manifests[0].tensors for each in manifests)


def test_joins_and_leaves_between_saves_change_nothing_and_leave_no_copies_behind() -> None:
    store = MemoryStore()
    team = CarryingTeam([store] * 4, Interval(steps=2), 2)
    team.do_step()
    team.do_step()
    team.form(0, 1, 2, 3)
    for _ in range(3):
        team.do_step()
    assert {name for name in team.checkpoints[0]._copies._room if name.startswith("carried.")} == {
        f"carried.{microbatch}.{name}" for microbatch in (0, 1) for name in fresh(0)
    }
    team.each(lambda worker: team.carried[worker].hand_over(worker == 1))
    team.form(3, 0, 2)
    for _ in range(3):
        team.do_step()
    assert list_steps(store) == [2, 4, 6, 8]
    for step in list_steps(store):
        found = dict(read_tensors(store, read_manifest(store, step)))
        for microbatch in range(M):
            state = {name: found[f"carried.{microbatch}.{name}"] for name in fresh(0)}
            assert same(state, after(microbatch, step)), (step, microbatch)


def test_a_save_goes_on_beside_steps_that_change_the_carried_state() -> None:
    store = MemoryStore()
    team = CarryingTeam([store] * 2, Interval(steps=2), 2)
    for _ in range(40):
        team.do_step(settle=False)
    team.finish()
    for step in list_steps(store):
        found = dict(read_tensors(store, read_manifest(store, step)))
        assert int(found["carried.3.x.step"]) == step
        assert torch.equal(found["carried.3.x.exp"], after(3, step)["x.exp"])


def test_a_holder_that_cannot_write_is_named_and_nobody_waits() -> None:
    store = MemoryStore()
    team = CarryingTeam([store, None, store], Interval(steps=2), 3)
    team.do_step()
    team.do_step()
    (failed,) = team.of(events.CheckpointFailed)
    assert failed.step == 2
    assert "worker 1 cannot write where the checkpoints are" in failed.failure["what"]
    assert [each._save for each in team.checkpoints] == [None] * 3
    assert all(isinstance(each.failure, StoreFailed) for each in team.checkpoints)
    assert list_steps(store) == []
    team.each(lambda worker: team.carried[worker].hand_over(worker == 1))
    team.form(0, 2)
    team.do_step()
    team.do_step()
    assert list_steps(store) == [4], "without it, saving works again"
    assert team.checkpoints[0].failure is None or team.checkpoints[0]._save is not None


def test_what_a_checkpoint_and_a_training_carry_may_differ_and_is_said() -> None:
    with_it, without = MemoryStore(), MemoryStore()
    carrying = CarryingTeam([with_it], Interval(steps=1), 1)
    plain = Team([without], Interval(steps=1))
    for team in (carrying, plain):
        team.do_step()
    theirs, ours = newest_good(with_it), newest_good(without)
    assert theirs is not None
    assert ours is not None
    read, words = carried_in(Home(without), ours, carrying.carried[0], SPEC)
    assert read is None
    assert "does not hold what compression left out" in words
    assert "begins anew" in words
    read, words = carried_in(Home(with_it), theirs, NOTHING, SPEC)
    assert read is None
    assert "ignored" in words
    assert carried_in(Home(without), ours, NOTHING, SPEC) == (None, "")

    other = Carried(ThreadComm(Hub(), 0), lambda _: {"residual": torch.zeros(3)})
    with pytest.raises(CheckpointMismatch, match="does not fit"):
        carried_in(Home(with_it), theirs, other, SPEC)
    read, words = carried_in(Home(with_it, force=True), theirs, other, SPEC)
    assert read is None
    assert "begins anew" in words


def test_what_one_mesh_carried_is_not_taken_up_by_another() -> None:
    """Also where it would fit: halves are as long as each other."""
    store = MemoryStore()
    team = CarryingTeam([store], Interval(steps=1), 1)
    team.do_step()
    found = newest_good(store)
    assert found is not None
    manifest = dataclasses.replace(found, facts={**found.facts, "job": {"mesh": "fsdp=2", "sharing": ""}})
    for here in ({"mesh": "tp=2"}, {"mesh": "fsdp=2", "sharing": "stages at 1"}, {}):
        spec = SPEC.model_copy(update=here)
        with pytest.raises(CheckpointMismatch, match="share the model in another way") as caught:
            carried_in(Home(store), manifest, team.carried[0], spec)
        assert "saved with fsdp=2; here it is " in caught.value.cause
        read, words = carried_in(Home(store, force=True), manifest, team.carried[0], spec)
        assert read is None
        assert "begins anew" in words
    read, _ = carried_in(Home(store), manifest, team.carried[0], SPEC.model_copy(update={"mesh": "fsdp=2"}))
    assert read is not None
