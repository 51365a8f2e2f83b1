# SPDX-License-Identifier: Apache-2.0
"""Workers come and go on request: joining, leaving, scaling, stopping, and what an operator is told."""

from __future__ import annotations

import pytest
from pretend_run import Pretend

from unisono.wire import messages as m


def test_a_joiner_comes_in_at_a_step_boundary_once_the_generation_is_formed_by_all() -> None:
    run = Pretend(least=1, most=3, open_door=True).begin(2)
    run.die(1)
    run.obey_spawns()
    (joiner,) = run.join("b")
    run.ready(joiner)
    run.later(5)
    assert run.members == [0], "worker 0 has not said that it is through with re-forming"
    run.form(0)
    run.later(1)
    assert run.members == [0, joiner]


def test_joiners_that_were_started_together_come_in_together() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(1)
    first, second, third = run.join("b", room=3)
    run.later(2)
    run.ready(first)
    run.later(0.5)
    assert run.generation == 1
    run.ready(second)
    assert run.generation == 1
    run.ready(third)
    assert run.members == [0, first, second, third]
    assert run.forms()[0].because == "workers 1, 2, 3 joined"


@pytest.mark.parametrize(("age_s", "waits"), [(2.0, True), (6.0, False)])
def test_a_joiner_waits_a_second_for_others_but_only_for_those_started_lately(age_s: float, waits: bool) -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(1)
    first, _ = run.join("b", room=2)
    run.later(age_s)
    run.ready(first)
    assert (run.generation == 1) is waits
    run.later(1)
    assert run.members == [0, first]


def test_no_more_join_than_the_run_wants() -> None:
    run = Pretend(least=1, most=2, open_door=True).begin(1)
    run.join("b", room=4)
    assert len(run.quorum.workers) == 2
    run.ready(1)
    run.hear(m.Started(worker=2), "a")
    run.form()
    run.ready(2)
    run.later(5)
    assert run.members == [0, 1]
    run.die(1)
    assert run.members == [0, 2], "a spare comes in as soon as there is a place"


def test_a_worker_of_the_owner_comes_first_because_the_first_writes_the_result() -> None:
    run = Pretend(least=1, most=3, open_door=True).begin(1)
    run.ready(*run.join("b", room=2))
    run.form()
    run.die(0)
    run.form()
    (replacement,) = run.obey_spawns()
    run.ready(replacement)
    assert run.members == [replacement, 1, 2]


def test_a_worker_that_is_asked_to_leave_goes_at_a_step_boundary_and_is_not_replaced() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.leave(1)
    forms = run.forms()
    assert sorted(forms) == [0, 1, 2], "the one that leaves is told too"
    assert {tuple(form.members) for form in forms.values()} == {(0, 2)}
    assert not any(form.urgent for form in forms.values())
    run.form()
    run.go(1)
    run.later(10)
    assert run.removed() == [(1, "preempted")]
    assert run.told(m.Spawn) == []
    assert run.generation == 2


def test_leaving_waits_for_a_formed_generation() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(3)
    run.leave(1)
    assert (run.generation, run.members) == (2, [0, 1, 2])
    run.form()
    assert run.members == [0, 2]


def test_a_loss_while_somebody_wants_to_leave_lets_it_go_at_once() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.die(3)
    run.leave(1)
    run.die(2)
    assert run.members == [0]
    assert run.forms()[1].members == [0], "or it would wait for ever for a generation that it is not in"


def test_a_worker_that_freezes_before_it_has_left_does_not_hold_the_others_up() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.leave(1)
    assert not run.forms()[0].urgent
    run.orders.clear()
    run.frozen = {1}
    run.later(0.5)
    assert run.members == [0, 2]
    assert run.forms()[0].urgent, "it is waited for at a boundary that it never reaches"
    assert run.told(m.Spawn) == []


def test_the_last_worker_that_is_asked_to_leave_stops_the_run_instead() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.leave(0)
    run.form(1)
    run.go(0)
    run.orders.clear()
    run.leave(1)
    (stop,) = run.told(m.Stop)
    assert (stop.worker, stop.because) == (1, "asked to leave by SIGTERM")
    assert run.told(m.Form) == []
    run.hear(m.Finished(worker=1))
    assert run.ended() is None


def test_all_who_are_asked_to_leave_in_one_breath_stop_the_run() -> None:
    run = Pretend(least=1, most=4).begin(4)
    run.leave(0, 1, 2, 3)
    assert run.members == [1, 2, 3]
    assert sorted(stop.worker for stop in run.told(m.Stop)) == []
    run.form()
    assert {stop.worker for stop in run.told(m.Stop)} == {1, 2, 3}
    assert run.members == [1, 2, 3], "they take the last step together"


def test_leaving_below_the_minimum_with_nobody_to_come_stops_the_run() -> None:
    run = Pretend(least=2, most=2).begin(2)
    run.leave(1)
    assert sorted(stop.worker for stop in run.told(m.Stop)) == [0, 1]
    assert run.ended() is None


def test_leaving_below_the_minimum_with_an_open_door_lets_it_go_and_the_rest_wait() -> None:
    run = Pretend(least=2, most=2, open_door=True).begin(2)
    run.leave(1)
    assert [depart.worker for depart in run.told(m.Depart)] == [1]
    run.later(5)
    assert len(run.told(m.Depart)) == 1, "told once"
    run.go(1)
    assert run.removed() == [(1, "preempted")]
    assert len(run.notices()) == 1
    run.ready(*run.join("b"))
    assert run.members == [0, 2]


def test_the_one_that_waits_alone_saves_and_ends_when_it_is_asked_to_leave_too() -> None:
    run = Pretend(least=2, most=2, open_door=True).begin(2)
    run.leave(1)
    run.go(1)
    run.orders.clear()
    run.leave(0)
    assert run.members == [0]
    assert run.forms()[0].urgent, "it is waiting for a generation, and gets one to finish in"
    assert [stop.worker for stop in run.told(m.Stop)]


def test_leavers_hand_the_state_to_a_joiner_before_they_go() -> None:
    run = Pretend(least=1, most=3).begin(2)
    run.hear(m.Started(worker=2), "a")
    run.broken(0, lost=1)
    run.ready(2)
    run.leave(0, 1)
    run.later(1)
    assert run.members == [0, 1, 2]
    run.form()
    assert run.members == [2]
    assert sorted(run.forms()) == [0, 1, 2]


def test_a_worker_that_has_not_joined_leaves_at_once() -> None:
    run = Pretend(least=1, most=3, open_door=True).begin(1)
    first, second = run.join("b", room=2)
    run.ready(first)
    run.leave(first, second)
    assert [depart.worker for depart in run.told(m.Depart)] == [first]
    assert [kill.worker for kill in run.told(m.Kill)] == [second], "it may not look up for minutes"
    run.go(first)
    run.die(second)
    run.later(5)
    assert run.removed() == [(first, "preempted"), (second, "preempted")]
    assert run.told(m.Spawn) == []
    assert run.members == [0]


def test_a_host_that_leaves_takes_its_workers_along_and_gets_no_new_ones() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(2)
    mine = run.join("b", room=2)
    run.ready(*mine)
    run.form()
    assert run.command("leave", host="b", because="SIGTERM").ok
    assert run.members == [0, 1]
    assert sorted(run.forms()) == [0, 1, 2, 3]
    run.form()
    run.go(*mine)
    run.hello("b", room=2)
    run.command("scale", 4)
    assert {order.to for order in run.orders if isinstance(order.message, m.Spawn)} == {"a"}


def test_an_operator_can_ask_a_host_to_leave_by_its_id() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(2)
    run.ready(*run.join("b"))
    run.form()
    answer = run.quorum.hear(m.Command(what="leave", host="b"), "operator", run.now_s)
    assert run.members == [0, 1]
    assert run.quorum.workers[2].leaving == "machine-b is wanted back"
    assert any(order.to == "operator" for order in answer)
    assert not run.command("leave", host="nobody").ok


def test_scaling_up_starts_workers_where_there_is_room() -> None:
    run = Pretend(least=1, most=2, microbatches=8, open_door=True).begin(1)
    run.ready(*run.join("b", room=3))
    run.form()
    answer = run.command("scale", 8)
    assert answer.ok
    assert answer.text == "from 2 to 8 workers at the next step boundary"
    where = [order.to for order in run.orders if isinstance(order.message, m.Spawn)]
    assert sorted(where) == ["a", "a", "a", "a", "b", "b"], (
        "3 on a and 2 on b have room, the last one goes to the owner"
    )
    assert run.command("scale", 8).ok
    assert len(run.told(m.Spawn)) == 6, "asked twice, started once"


def test_scaling_up_does_not_use_the_budget_of_restarts() -> None:
    run = Pretend(least=1, most=2, microbatches=4, max_restarts=0).begin(2)
    run.command("scale", 4)
    new = run.obey_spawns()
    run.ready(*new)
    assert run.members == [0, 1, *new]


def test_scaling_down_lets_those_go_that_are_only_starting_and_then_the_last() -> None:
    run = Pretend(least=1, most=4).begin(3)
    run.hear(m.Started(worker=3), "a")
    run.command("scale", 2)
    assert [kill.worker for kill in run.told(m.Kill)] == [3]
    assert run.members == [0, 1]
    run.form()
    run.go(2)
    run.die(3)
    run.later(10)
    assert sorted(run.removed()) == [(2, "left"), (3, "left")]
    assert run.told(m.Spawn) == []


def test_after_scaling_down_a_death_is_replaced_only_up_to_the_new_number() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.command("scale", 2)
    run.form()
    run.go(2)
    run.die(1)
    assert [spawn.replaces for spawn in run.told(m.Spawn)] == [1]
    run.obey_spawns()
    assert run.quorum.target == 2


@pytest.mark.parametrize("number", [0, 1, 9])
def test_a_number_of_workers_that_cannot_be_is_refused_with_the_reason(number: int) -> None:
    run = Pretend(least=2, most=4, microbatches=8).begin(4)
    answer = run.command("scale", number)
    assert not answer.ok
    assert "2 to 8" in answer.text
    assert run.quorum.target == 4


def test_stopping_tells_every_member_once_and_lets_nobody_in() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(2)
    (joiner,) = run.join("b")
    assert run.command("stop", because="stopped by unisono stop").ok
    assert run.command("stop", because="stopped by unisono stop").ok
    assert [stop.worker for stop in run.told(m.Stop)] == [0, 1]
    run.ready(joiner)
    run.later(5)
    assert run.members == [0, 1]
    assert not run.command("scale", 3).ok


def test_a_command_nobody_knows_is_refused_by_name() -> None:
    run = Pretend().begin(1)
    answer = run.command("dance")
    assert not answer.ok
    assert "'dance'" in answer.text


def test_when_the_owner_is_through_the_other_hosts_are_told_at_once() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(1)
    run.ready(*run.join("b"))
    run.form()
    assert not run.command("over", host="b").ok
    run.orders.clear()
    assert run.command("over", host="a").ok
    assert [(order.to, order.message) for order in run.orders] == [("b", m.End())]
    run.die(0, 1)
    run.later(10)
    assert len(run.orders) == 1, "what happens afterwards is nobody's concern"


def test_the_owner_can_be_through_after_the_run_has_ended_by_a_failure() -> None:
    run = Pretend(least=2, most=2, max_restarts=0, open_door=False).begin(2)
    run.hello("b", room=0)
    run.die(0)
    assert run.ended() is not None
    run.orders.clear()
    assert run.command("over", host="a").ok
    assert [order.to for order in run.orders] == ["b"]


def test_ps_shows_who_takes_part_and_what_each_does() -> None:
    run = Pretend(least=1, most=4, open_door=True).begin(2)
    (joiner,) = run.join("b")
    run.doing(0, "computing", step=7)
    run.later(0.5)
    answer = run.command("ps")
    rows = {row["worker"]: row for row in answer.data["workers"]}
    assert (answer.data["generation"], answer.data["target"]) == (1, 4)
    assert (rows[0]["doing"], rows[0]["step"], rows[0]["member"], rows[0]["host"]) == (
        "computing",
        7,
        True,
        "machine-a",
    )
    assert (rows[joiner]["doing"], rows[joiner]["member"], rows[joiner]["host"]) == ("starting", False, "machine-b")


def test_a_run_that_is_ending_obeys_nothing_but_questions() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.hear(m.Finished(worker=0))
    assert run.command("ps").ok
    assert not run.command("scale", 1).ok
    assert not run.command("stop", because="x").ok


def test_turns_are_given_to_the_first_worker_and_then_to_all() -> None:
    run = Pretend(least=1, most=3)
    run.started(0, 1, 2)
    run.hello()
    run.hear(m.Turn(worker=1, number=0))
    run.hear(m.Turn(worker=2, number=0))
    assert run.told(m.Proceed) == []
    run.hear(m.Turn(worker=0, number=0))
    assert [proceed.worker for proceed in run.told(m.Proceed)] == [0]
    run.hear(m.Turn(worker=0, number=0, done=True))
    assert [proceed.worker for proceed in run.told(m.Proceed)] == [0, 1, 2]


def test_a_first_worker_that_dies_inside_is_followed_by_the_next() -> None:
    run = Pretend(least=1, most=3)
    run.started(0, 1, 2)
    run.hello()
    for worker in range(3):
        run.hear(m.Turn(worker=worker, number=0))
    run.die(0)
    assert [proceed.worker for proceed in run.told(m.Proceed)] == [0, 1]
