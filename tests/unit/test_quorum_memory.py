# SPDX-License-Identifier: Apache-2.0
"""The coordinator dies and comes back: what it remembers, what hosts tell again, and which orders are given again."""

from __future__ import annotations

import json

import pytest
from pretend_run import Pretend

from unisono.core.errors import InternalError
from unisono.elastic.quorum import Quorum, Rules
from unisono.wire import messages as m


def eventful() -> Pretend:
    """A run in which much has happened: deaths, vacancies, a host that leaves, turns, a worker that was put out."""
    run = Pretend(least=2, most=6, open_door=True).begin(3)
    run.hear(m.Turn(worker=0, number=0))
    run.hear(m.Turn(worker=0, number=0, done=True))
    run.hear(m.Turn(worker=0, number=1))
    run.ready(*run.join("b", room=2))
    run.form()
    run.die(1, place="train.py:3")
    run.die(*run.obey_spawns())
    run.hear(m.Accuse(worker=0, who=2, generation=run.generation, why="other weights"))
    run.quorum.hear(m.Command(what="leave", because="SIGTERM"), "b", run.now_s)
    return run


def test_what_must_survive_survives_as_it_was() -> None:
    run = eventful()
    before = run.quorum.durable()
    again = Quorum(run.rules)
    again.restore(json.loads(json.dumps(before)), run.now_s)
    assert again.durable() == before
    assert again.current.generation == run.generation
    assert again.roster.turns.inside == run.quorum.roster.turns.inside != {}
    assert again.roster.vacancies == run.quorum.roster.vacancies != []
    assert again.hosts["b"].leaving


def test_a_coordinator_that_comes_back_to_a_quiet_run_orders_nothing() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.restart_coordinator()
    run.hello()
    run.later(30)
    assert run.orders == []
    assert run.quorum.roster.is_formed


def test_a_generation_that_was_written_down_but_never_told_is_told_again() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.leave(2)
    assert run.members == [0, 1]
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    forms = run.forms()
    assert sorted(forms) == [0, 1, 2], "also to the one that leaves with it"
    assert {form.generation for form in forms.values()} == {2}
    assert not any(form.urgent for form in forms.values()), "a change at a step boundary stays one"


def test_an_urgent_generation_is_told_again_as_urgent_and_only_to_those_who_have_not_formed_it() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.die(2)
    run.form(0)
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert sorted(run.forms()) == [1]
    assert run.forms()[1].urgent


def test_a_lost_order_to_start_a_worker_is_given_again() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.die(2)
    (spawn,) = run.told(m.Spawn)
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert run.told(m.Spawn) == [spawn]


def test_a_worker_that_was_to_be_replaced_later_is_still_replaced() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.die(1)
    run.die(*run.obey_spawns())
    run.restart_coordinator()
    run.hello()
    assert run.told(m.Spawn) == []
    run.later(1)
    assert [spawn.replaces for spawn in run.told(m.Spawn)] == [2]


def test_the_wait_for_more_workers_does_not_begin_anew() -> None:
    run = Pretend(least=2, most=2, rejoin_s=30.0).begin(2)
    run.die(1)
    run.obey_spawns()
    for _ in range(3):
        run.later(9)
        run.restart_coordinator()
        run.hello()
    assert run.ended() is None
    run.later(4)
    assert run.ended() is not None


def test_a_death_while_nobody_listened_is_heard_with_the_hello_and_counted_once() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.said[1]["gone"] = m.Gone(worker=1, exit_code=-9, because="ended by SIGKILL")
    for _ in range(3):
        run.restart_coordinator()
        run.hello()
    assert run.members == [0, 2]
    assert run.quorum.roster.restarts == 1
    assert run.removed() == [(1, "died")]


def test_a_connection_that_broke_while_nobody_listened_is_heard_with_the_hello() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.said[1]["broken"] = m.Broken(worker=1, generation=1, lost=0)
    run.restart_coordinator()
    run.hello()
    run.later(1)
    assert (run.generation, run.members) == (2, [0, 1])


def test_a_host_that_does_not_come_back_after_the_restart_is_noticed() -> None:
    run = Pretend(least=1, most=3, open_door=True).begin(2)
    run.ready(*run.join("b"))
    run.form()
    run.restart_coordinator()
    run.orders.clear()
    run.silent = {"b"}
    run.hello()
    run.later(3)
    assert run.members == [0, 1, 2]
    run.later(2)
    assert run.members == [0, 1]
    assert run.removed() == [(2, "unreachable")]


@pytest.mark.parametrize("how", ["frozen", "refused"])
def test_those_who_were_sent_away_are_sent_away_again(how: str) -> None:
    run = Pretend(least=1, most=4).begin(3)
    if how == "frozen":
        run.frozen = {1}
        run.later(0.5)
    else:
        run.hear(m.Started(worker=3), "a")
        run.ready(3, model="large")
    (first,) = run.told(m.Depart)
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert [depart.worker for depart in run.told(m.Depart)] == [first.worker]
    assert run.removed() == []


def test_an_order_to_stop_is_given_again() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.command("stop", because="enough")
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert [(stop.worker, stop.because) for stop in run.told(m.Stop)] == [(0, "enough"), (1, "enough")]


def test_the_end_is_told_again_to_whoever_comes_back() -> None:
    run = Pretend(least=2, most=2, max_restarts=0).begin(2)
    run.die(1)
    end = run.ended()
    assert end is not None
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert run.ended() == end
    run.later(10)
    assert len(run.orders) == 1


def test_a_fatal_failure_is_still_left_to_the_owner() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.die(1, fatal=True)
    run.restart_coordinator()
    run.hello()
    run.die(2)
    run.later(10)
    assert run.told(m.Form) == []


def test_a_first_worker_keeps_its_turn_and_is_told_again() -> None:
    run = Pretend(least=1, most=2)
    run.started(0, 1)
    run.hello()
    run.hear(m.Turn(worker=0, number=0))
    run.hear(m.Turn(worker=1, number=0))
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert [proceed.worker for proceed in run.told(m.Proceed)] == [0]
    run.hear(m.Turn(worker=0, number=0, done=True, said="blocks.1"))
    assert [(proceed.worker, proceed.said) for proceed in run.told(m.Proceed)] == [(0, ""), (1, "blocks.1")]
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    assert [(proceed.worker, proceed.said) for proceed in run.told(m.Proceed)] == [(1, "blocks.1")]


def test_a_run_that_was_closing_still_is() -> None:
    run = Pretend(least=2, most=3).begin(3)
    run.hear(m.Finished(worker=0))
    run.hear(m.Finished(worker=1))
    run.restart_coordinator()
    run.hello()
    run.die(2)
    run.later(10)
    assert run.told(m.Spawn) == []
    assert run.ended() is None


def test_a_worker_that_was_killed_before_its_host_had_started_it_is_gone() -> None:
    run = Pretend(least=1, most=4).begin(2)
    run.command("scale", 3)
    run.command("scale", 2)
    assert [kill.worker for kill in run.told(m.Kill)] == [2]
    run.orders.clear()
    run.hello()
    assert run.orders == []
    assert run.quorum.workers[2].gone


@pytest.mark.parametrize("data", [{}, {"target": 3}, {"workers": [{"number": 1, "mood": "bad"}]}])
def test_a_journal_that_makes_no_sense_is_refused_and_changes_nothing(data: dict[str, object]) -> None:
    quorum = Quorum(Rules(min=1, max=2))
    before = quorum.durable()
    with pytest.raises(InternalError, match="journal"):
        quorum.restore(before | data if data.get("workers") else data, 0.0)
    assert quorum.durable() == before
