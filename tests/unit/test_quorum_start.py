# SPDX-License-Identifier: Apache-2.0
"""How a run begins: who is waited for, how long, and what ends it before it has begun."""

from __future__ import annotations

from pretend_run import Pretend

from unisono.core.errors import DataDisagrees, Preempted, ReplicasDisagree, SamePlaceTwice, TooFewWorkers
from unisono.wire import messages as m


def test_the_first_generation_forms_when_all_started_workers_are_ready() -> None:
    run = Pretend(least=1, most=4)
    run.started(0, 1, 2)
    run.hello()
    run.ready(0, 2)
    assert run.generation == 0
    run.ready(1)
    assert run.members == [0, 1, 2]
    forms = run.forms()
    assert sorted(forms) == [0, 1, 2]
    assert all(form.urgent and form.because == "the run starts" for form in forms.values())
    assert forms[0].ranges == [[0, 2], [2, 3], [3, 4]]
    assert forms[0].addresses == ["unix:0", "unix:1", "unix:2"]


def test_once_the_minimum_is_ready_the_rest_is_waited_for_but_not_for_ever() -> None:
    run = Pretend(least=2, most=3)
    run.started(0, 1, 2)
    run.hello()
    run.ready(0)
    run.later(60)
    assert run.generation == 0, "below the minimum nobody starts, however long it takes"
    run.ready(1)
    run.later(19)
    assert run.generation == 0
    run.later(2)
    assert run.members == [0, 1]


def test_a_minimum_that_is_lost_again_starts_the_wait_anew() -> None:
    run = Pretend(least=2, most=3)
    run.started(0, 1, 2)
    run.hello()
    run.ready(0, 1)
    run.later(15)
    run.die(1)
    run.obey_spawns()
    run.later(15)
    run.ready(2)
    run.later(15)
    assert run.generation == 0
    run.later(6)
    assert run.members == [0, 2]


def test_a_late_worker_joins_the_run_that_began_without_it() -> None:
    run = Pretend(least=1, most=2)
    run.started(0, 1)
    run.hello()
    run.ready(0)
    run.later(21)
    run.form()
    run.ready(1)
    assert run.members == [0, 1]
    assert not run.forms()[0].urgent


def test_a_hello_is_heard_to_its_end_before_anything_is_decided() -> None:
    run = Pretend(least=1, most=4)
    run.started(0, 1, 2, 3)
    for number in range(4):
        run.said[number]["ready"] = m.Ready(worker=number, address="", facts=run.facts)
    run.hello()
    assert run.members == [0, 1, 2, 3], "not worker 0 alone, which is named first"


def test_before_the_owner_has_spoken_nothing_is_given_up_and_no_number_is_taken() -> None:
    run = Pretend(least=1, most=4, open_door=True)
    run.hello("b", room=2)
    run.later(1)
    assert run.ended() is None
    assert run.told(m.Spawn) == []
    run.started(0, 1)
    run.hello("a")
    assert [(spawn.worker, spawn.slot) for spawn in run.told(m.Spawn)] == [(2, 0), (3, 1)]


def test_a_coordinator_that_is_up_before_its_owner_waits_for_it() -> None:
    run = Pretend(least=1, most=2)
    run.later(5)
    assert run.ended() is None
    run.started(0, 1)
    run.hello()
    run.ready(0, 1)
    assert run.members == [0, 1]


def test_a_worker_that_dies_before_the_start_is_replaced_and_waited_for() -> None:
    run = Pretend(least=2, most=2)
    run.started(0, 1)
    run.hello()
    run.ready(0)
    run.die(1)
    assert run.removed() == [(1, "died")]
    assert run.obey_spawns() == [2]
    run.ready(2)
    assert run.members == [0, 2]


def test_workers_that_die_at_the_same_place_before_the_start_end_the_run() -> None:
    run = Pretend(least=1, most=2)
    run.started(0, 1)
    run.hello()
    run.die(0, place="exit code 3")
    run.die(1, place="exit code 3")
    assert isinstance(run.ended(), SamePlaceTwice)


def test_without_a_budget_the_first_death_below_the_minimum_is_itself_the_story() -> None:
    run = Pretend(least=2, most=2, max_restarts=0)
    run.started(0, 1)
    run.hello()
    run.die(1)
    end = run.ended()
    assert isinstance(end, m.End)
    assert end.blame == [1]


def test_the_budget_is_named_when_it_is_spent() -> None:
    run = Pretend(least=2, most=2, max_restarts=1)
    run.started(0, 1)
    run.hello()
    run.die(1)
    assert run.obey_spawns() == [2]
    run.die(2)
    end = run.ended()
    assert isinstance(end, TooFewWorkers)
    assert "1 of 1 restarts" in end.cause


def test_workers_that_disagree_at_the_start_end_the_run() -> None:
    for facts, kind in (({"model": "large"}, ReplicasDisagree), ({"samples": "5"}, None)):
        run = Pretend(least=2, most=2)
        run.started(0, 1)
        run.hello()
        run.ready(0)
        run.ready(1, **facts)
        end = run.ended()
        assert end is None if kind is None else isinstance(end, kind), "facts that only one of them names are no matter"


def test_the_dataset_that_differs_is_named_with_both_sizes() -> None:
    run = Pretend(least=2, most=2)
    run.facts["samples"] = "100"
    run.started(0, 1)
    run.hello()
    run.ready(0)
    run.ready(1, samples="99")
    end = run.ended()
    assert isinstance(end, DataDisagrees)
    assert end.what == "worker 1's dataset has 99 samples, worker 0's has 100"


def test_a_joiner_that_disagrees_is_refused_and_not_replaced() -> None:
    run = Pretend(least=1, most=3, open_door=True).begin(2)
    (joiner,) = run.join("b")
    run.ready(joiner, model="large")
    assert run.removed() == [(joiner, "refused")]
    (depart,) = run.told(m.Depart)
    assert depart.worker == joiner
    assert depart.failure is not None
    run.die(joiner)
    run.later(5)
    assert run.members == [0, 1]
    assert run.told(m.Spawn) == []
    assert run.ended() is None


def test_with_an_open_door_the_run_waits_for_others_to_join_and_says_so_once() -> None:
    run = Pretend(least=3, most=4, open_door=True)
    run.started(0, 1)
    run.hello()
    run.ready(0, 1)
    run.later(1000)
    assert run.ended() is None
    assert run.notices() == ["2 of at least 3 workers are here; waiting for others to join"]
    run.ready(*run.join("b", room=2))
    assert run.members == [0, 1, 2, 3]


def test_with_an_open_door_a_run_whose_workers_have_all_died_ends_after_a_while() -> None:
    run = Pretend(least=2, most=2, open_door=True, max_restarts=0, rejoin_s=30.0)
    run.started(0, 1)
    run.hello()
    run.die(0, 1)
    run.later(29)
    assert run.ended() is None
    run.later(2)
    assert isinstance(run.ended(), TooFewWorkers)


def test_a_run_that_is_stopped_before_its_first_step_ends_as_preempted() -> None:
    run = Pretend(least=1, most=2)
    run.started(0, 1)
    run.hello()
    assert run.command("stop", because="stopped by unisono stop").ok
    assert isinstance(run.ended(), Preempted)


def test_workers_that_are_all_asked_to_leave_before_the_start_end_the_run_as_preempted() -> None:
    run = Pretend(least=1, most=2)
    run.started(0, 1)
    run.hello()
    run.ready(0)
    run.leave(0, 1)
    assert {order.worker for order in [*run.told(m.Depart), *run.told(m.Kill)]} == {0, 1}
    assert isinstance(run.ended(), Preempted)


def test_messages_about_a_worker_count_only_from_its_own_host() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(2)
    run.join("b")
    run.hear(m.Gone(worker=0, exit_code=1, because="a lie"), "b")
    assert run.members == [0, 1]
    assert run.removed() == []
