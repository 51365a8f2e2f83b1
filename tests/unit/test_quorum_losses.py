# SPDX-License-Identifier: Apache-2.0
"""Workers are lost: who goes on, who replaces them and how soon, and when the run has to end."""

from __future__ import annotations

import pytest
from pretend_run import Pretend

from unisono.core.errors import Preempted, SamePlaceTwice, TooFewWorkers
from unisono.wire import messages as m


def test_a_death_makes_an_urgent_generation_of_the_rest_at_once() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(2)
    assert run.members == [0, 1, 3]
    assert run.generation == 2
    forms = run.forms()
    assert sorted(forms) == [0, 1, 3]
    assert all(form.urgent and form.because == "worker 2 was lost" for form in forms.values())
    assert forms[0].ranges == [[0, 2], [2, 3], [3, 4]]
    assert run.removed() == [(2, "died")]


def test_two_deaths_in_one_breath_are_two_generations_that_lead_to_the_same_members() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(1, 2)
    assert (run.generation, run.members) == (3, [0, 3])


def test_a_joiner_that_is_ready_comes_in_with_the_urgent_generation() -> None:
    run = Pretend(least=1, most=4).begin(2)
    run.hear(m.Started(worker=2), "a")
    run.broken(1)
    run.ready(2)
    assert run.members == [0, 1]
    run.die(0)
    assert run.members == [1, 2]


def test_the_dead_worker_is_replaced_at_once_in_its_slot_and_joins_at_a_step_boundary() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(2)
    (spawn,) = run.told(m.Spawn)
    assert (spawn.worker, spawn.slot, spawn.replaces) == (4, 2, 2)
    run.obey_spawns()
    run.ready(4)
    assert run.generation == 2, "the generation without it is not formed yet"
    run.form()
    assert run.members == [0, 1, 3, 4]
    assert run.forms()[0].because == "worker 4 joined"
    assert [form.urgent for form in run.forms().values()] == [False, False, False, True]


def test_below_the_minimum_the_run_waits_and_says_so_once() -> None:
    run = Pretend(least=3, most=3, rejoin_s=300.0).begin(3)
    run.die(1)
    assert run.generation == 1
    run.obey_spawns()
    run.later(30)
    assert len(run.notices()) == 1
    assert run.notices()[0].startswith("2 of at least 3 workers are left; it goes on when another has started")
    run.ready(3)
    assert run.members == [0, 2, 3]
    assert run.forms()[0].urgent


def test_below_the_minimum_for_too_long_ends_the_run() -> None:
    run = Pretend(least=3, most=3, rejoin_s=20.0).begin(3)
    run.die(1)
    run.obey_spawns()
    run.later(19)
    assert run.ended() is None
    run.later(2)
    end = run.ended()
    assert isinstance(end, TooFewWorkers)
    assert "waited 20 s" in end.cause
    assert run.told(m.End) == [], "those who hold the state save it first"
    assert {order.worker: order.because for order in run.told(m.Stop)} == {0: end.what, 2: end.what}
    assert run.forms()[0].members == [0, 2]


def test_below_the_minimum_with_nobody_to_come_ends_the_run_at_once() -> None:
    run = Pretend(least=3, most=3, max_restarts=0).begin(3)
    run.die(1)
    end = run.ended()
    assert isinstance(end, m.End)
    assert end.blame == [1]


def test_workers_that_die_young_in_one_place_are_replaced_ever_later() -> None:
    run = Pretend(least=1, most=2).begin(2)
    victim, pauses = 1, []
    for _ in range(8):
        died_s = run.now_s
        run.die(victim)
        while not run.told(m.Spawn):
            run.later(0.2)
        pauses.append(run.now_s - died_s)
        (victim,) = run.obey_spawns()
        run.ready(victim)
        run.form()
    assert pauses == pytest.approx([0, 1, 2, 4, 8, 16, 30, 30], abs=0.3)


def test_a_worker_that_has_lived_long_is_replaced_at_once_whatever_came_before() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.die(1)
    (victim,) = run.obey_spawns()
    run.ready(victim)
    run.later(61)
    run.form()
    run.die(victim)
    assert len(run.told(m.Spawn)) == 1


def test_when_the_budget_is_spent_the_run_goes_on_with_fewer() -> None:
    run = Pretend(least=1, most=3, max_restarts=1).begin(3)
    run.die(1)
    assert run.obey_spawns() == [3]
    run.die(2)
    run.later(60)
    assert run.told(m.Spawn) == []
    assert run.members == [0]
    assert run.ended() is None


def test_two_deaths_at_the_same_place_end_the_run() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(1, because="IndexError", place="train.py:7")
    run.die(2, because="other", place="train.py:8")
    assert run.ended() is None
    run.die(3, because="IndexError", place="train.py:7")
    end = run.ended()
    assert isinstance(end, SamePlaceTwice)
    assert "workers 1 and 3" in end.what


def test_a_fatal_failure_is_left_to_the_owner_and_nothing_more_is_ordered() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(1, because="the loss is NaN", fatal=True)
    run.die(2)
    run.later(30)
    assert run.told(m.Form) == []
    assert run.told(m.Spawn) == []
    assert run.ended() is None


def test_when_everyone_who_held_the_state_is_gone_the_run_ends() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.die(0)
    run.obey_spawns()
    run.form()
    run.die(1)
    end = run.ended()
    assert isinstance(end, TooFewWorkers)
    assert "state" in end.what


def test_a_joiner_that_was_still_copying_the_state_does_not_hold_it() -> None:
    run = Pretend(least=1, most=2).begin(1)
    run.hear(m.Started(worker=1), "a")
    run.ready(1)
    assert run.members == [0, 1]
    run.form(0)
    run.die(0)
    assert run.ended() is None, "its own word may be on the way"
    run.broken(1, lost=0)
    assert run.ended() is not None


def test_a_word_that_was_on_its_way_can_save_the_run() -> None:
    run = Pretend(least=1, most=2).begin(1)
    run.hear(m.Started(worker=1), "a")
    run.ready(1)
    run.form(0)
    run.die(0)
    run.form(1)
    assert run.ended() is None
    assert run.members == [1]


def test_a_word_that_never_comes_is_not_waited_for_for_ever() -> None:
    run = Pretend(least=1, most=2).begin(1)
    run.hear(m.Started(worker=1), "a")
    run.ready(1)
    run.form(0)
    run.die(0)
    run.later(4)
    assert run.ended() is not None


def test_before_anything_was_formed_by_all_there_is_no_state_to_lose() -> None:
    run = Pretend(least=1, most=2)
    run.started(0, 1)
    run.hello()
    run.ready(0, 1)
    run.form(0)
    run.die(0)
    assert run.ended() is None
    assert run.members == [1], "it begins from the initial state, as worker 0 would have"


def test_a_frozen_worker_is_put_out_and_replaced_and_leaves_if_it_wakes() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.frozen = {1}
    run.later(0.5)
    assert run.members == [0, 2]
    assert run.forms()[0].urgent
    assert run.removed() == [(1, "frozen")]
    assert [depart.worker for depart in run.told(m.Depart)] == [1]
    assert [spawn.replaces for spawn in run.told(m.Spawn)] == [1]
    run.frozen = set()
    run.later(5)
    run.go(1)
    assert run.removed() == [(1, "frozen")], "told once"
    assert len(run.told(m.Spawn)) == 1


def test_a_frozen_worker_that_alone_holds_the_state_is_waited_for() -> None:
    run = Pretend(least=1, most=3, hang_s=5.0).begin(1)
    run.hear(m.Started(worker=1), "a")
    run.ready(1)
    run.form(0)
    run.doing(0, "computing")
    run.doing(1, "copying the state", waits=True)
    run.frozen = {0}
    run.later(60)
    assert run.members == [0, 1]
    assert run.removed() == []
    assert run.told(m.Kill) == []


def test_workers_that_freeze_together_are_waited_for_until_one_of_them_wakes() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.frozen = {0, 1}
    run.later(60)
    assert run.removed() == []
    run.frozen = {0}
    run.later(0.5)
    assert run.removed() == [(0, "frozen")]
    assert run.members == [1]


def test_a_worker_with_wrong_weights_is_killed_replaced_once_and_named_as_corrupt() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.hear(m.Accuse(worker=0, who=1, generation=1, why="other weights"))
    run.hear(m.Accuse(worker=2, who=1, generation=1, why="other weights"))
    assert run.members == [0, 2]
    assert [kill.worker for kill in run.told(m.Kill)] == [1]
    run.die(1, because="other weights")
    assert run.removed() == [(1, "corrupt")]
    assert run.obey_spawns() == [3]
    run.ready(3)
    run.form()
    run.form()
    run.hear(m.Accuse(worker=0, who=3, generation=run.generation, why="other weights"))
    run.die(3, because="other weights")
    run.later(10)
    assert run.told(m.Spawn) == [], "twice in the same place: that machine computes wrongly"


def test_an_accusation_of_an_old_generation_or_by_a_stranger_is_not_heard() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.die(2)
    run.hear(m.Accuse(worker=0, who=1, generation=1, why="old"))
    run.hear(m.Accuse(worker=2, who=1, generation=2, why="by a dead one"))
    assert run.told(m.Kill) == []


def test_a_death_behind_the_end_still_lets_the_others_finish_whatever_the_minimum() -> None:
    run = Pretend(least=3, most=3).begin(3)
    run.hear(m.Finished(worker=0))
    run.die(1)
    assert run.members == [2]
    assert run.forms()[2].urgent
    assert run.told(m.Spawn) == [], "nobody new is needed"
    assert run.removed() == [(1, "died")]
    run.form()
    run.hear(m.Finished(worker=2))
    run.go(0, 2)
    run.later(10)
    assert run.ended() is None


def test_connections_that_end_with_a_finished_worker_do_not_keep_the_others_from_finishing() -> None:
    run = Pretend(least=3, most=3).begin(3)
    run.hear(m.Finished(worker=0))
    run.go(0)
    run.broken(1, lost=0)
    run.later(1)
    assert run.members == [1, 2]


def test_when_all_have_finished_nothing_more_is_ordered() -> None:
    run = Pretend(least=2, most=3).begin(3)
    for worker in range(3):
        run.hear(m.Finished(worker=worker))
    run.go(0, 1, 2)
    run.later(30)
    assert run.orders == []


def test_the_last_worker_that_dies_while_the_run_is_being_stopped_ends_it() -> None:
    run = Pretend(least=1, most=2, max_restarts=0).begin(2)
    run.command("stop", because="enough")
    run.die(0, 1)
    assert run.ended() is not None


def test_a_death_while_the_run_is_being_stopped_does_not_stop_the_rest_from_saving() -> None:
    run = Pretend(least=2, most=2).begin(2)
    run.command("preempt", because="asked to leave by SIGTERM")
    assert sorted(stop.worker for stop in run.told(m.Stop)) == [0, 1]
    run.die(1)
    assert run.members == [0], "the minimum is of no use any more"
    assert run.told(m.Stop)[-1].worker == 0
    assert run.told(m.Spawn) == []
    assert not isinstance(run.ended(), Preempted)
