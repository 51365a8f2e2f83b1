# SPDX-License-Identifier: Apache-2.0
"""Hosts fall silent and come back, connections break, workers hang or are slow: what is noticed, and what follows."""

from __future__ import annotations

import pytest
from pretend_run import Pretend

from unisono.core import events
from unisono.wire import messages as m


def with_two_hosts(least: int = 1, **rules: float) -> Pretend:
    """Workers 0 and 1 on the owner's machine, 2 and 3 on b."""
    run = Pretend(least=least, most=4, open_door=True, **rules).begin(2)
    run.ready(*run.join("b", room=2))
    run.form()
    run.orders.clear()
    return run


def test_the_workers_of_a_silent_host_are_dropped_at_once_and_reported_once() -> None:
    run = with_two_hosts()
    run.silent = {"b"}
    run.later(3)
    assert run.generation == 2
    run.later(2)
    assert run.members == [0, 1]
    assert run.forms()[0].urgent
    run.form()
    run.later(60)
    assert run.removed() == [(2, "unreachable"), (3, "unreachable")]
    assert run.told(m.Spawn) == [], "they may come back"
    assert run.generation == 3


def test_a_host_that_hung_up_has_a_second_to_come_back() -> None:
    run = with_two_hosts()
    run.silent = {"b"}
    run.quorum.disconnected("b", run.now_s)
    run.later(0.5)
    assert run.members == [0, 1, 2, 3]
    run.hello("b")
    run.silent = set()
    run.later(10)
    assert run.members == [0, 1, 2, 3]
    run.quorum.disconnected("b", run.now_s)
    run.silent = {"b"}
    run.later(1)
    assert run.members == [0, 1]


def test_workers_that_come_back_join_and_are_told_urgently_whatever_they_still_wait_for() -> None:
    run = with_two_hosts()
    run.silent = {"b"}
    run.later(5)
    run.form()
    run.silent = set()
    run.orders.clear()
    run.later(0.5)
    assert run.members == [0, 1, 2, 3]
    forms = run.forms()
    assert [forms[number].urgent for number in range(4)] == [False, False, True, True]
    assert forms[2].generation == run.generation
    run.form()
    run.later(30)
    assert (run.generation, run.removed()) == (4, [])


def test_a_late_word_of_an_old_generation_does_not_count_for_the_new_one() -> None:
    run = with_two_hosts()
    run.silent = {"b"}
    run.later(5)
    run.form()
    run.silent = set()
    run.later(0.5)
    run.hear(m.Formed(worker=2, generation=2))
    run.form(0, 1, 3)
    assert not run.quorum.roster.is_formed
    run.hear(m.Formed(worker=2, generation=run.generation))
    assert run.quorum.roster.is_formed


def test_a_host_that_comes_and_goes_below_the_minimum_is_reported_once() -> None:
    run = with_two_hosts(least=4)
    run.die(0)
    run.obey_spawns()
    for _ in range(3):
        run.silent = {"b"}
        run.later(5)
        run.silent = set()
        run.later(1)
    assert run.generation == 1, "nobody has taken the place of worker 0 yet"
    assert run.removed() == [(0, "died"), (2, "unreachable"), (3, "unreachable")]


def test_below_the_minimum_a_host_that_comes_back_ends_the_wait() -> None:
    run = with_two_hosts(least=4)
    run.silent = {"b"}
    run.later(10)
    assert run.generation == 1
    run.silent = set()
    run.later(0.5)
    assert (run.generation, run.members) == (2, [0, 1, 2, 3])
    assert run.forms()[0].because == "enough workers again"
    run.form()
    run.orders.clear()
    run.silent = {"b"}
    run.later(5)
    assert run.removed() == [(2, "unreachable"), (3, "unreachable")], "the next time is told again"


def test_a_worker_that_died_behind_a_cut_network_is_replaced_when_its_host_is_back() -> None:
    run = with_two_hosts()
    run.silent = {"b"}
    run.later(5)
    run.said[2]["gone"] = m.Gone(worker=2, exit_code=-9, because="ended by SIGKILL")
    run.silent = set()
    run.hello("b")
    assert [(spawn.worker, spawn.replaces) for spawn in run.told(m.Spawn)] == [(4, 2)]
    assert run.removed() == [(2, "unreachable"), (3, "unreachable"), (2, "died")]


def test_a_place_on_a_host_that_is_away_is_filled_when_it_comes_back() -> None:
    run = with_two_hosts()
    run.die(3)
    run.die(*run.obey_spawns())
    run.later(1)
    (fourth,) = run.obey_spawns()
    run.die(fourth)  # young, for the third time: its place is filled in two seconds
    run.silent = {"b"}
    run.quorum.disconnected("b", run.now_s)
    run.later(5)
    assert run.told(m.Spawn) == []
    run.silent = set()
    run.hello("b")
    assert [spawn.replaces for spawn in run.told(m.Spawn)] == [fourth]


def test_when_all_who_hold_the_state_are_out_of_reach_the_run_waits_but_not_for_ever() -> None:
    run = with_two_hosts(rejoin_s=30.0)
    run.die(0, 1)
    new = run.obey_spawns()
    run.silent = {"b"}
    run.later(5)
    run.ready(*new)
    run.later(20)
    assert run.ended() is None
    assert run.members == [2, 3], "those who have come cannot go on without the state"
    run.later(20)
    assert run.ended() is not None


def test_the_owner_is_never_unreachable() -> None:
    run = Pretend(least=1, most=2).begin(2)
    run.silent = {"a"}
    run.quorum.disconnected("a", run.now_s)
    run.later(600)
    assert run.orders == []


def test_a_broken_connection_without_a_death_is_followed_by_the_same_members() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.broken(0, lost=2)
    run.later(0.25)
    assert run.generation == 1, "a death may explain it in a moment"
    run.later(0.5)
    assert (run.generation, run.members) == (2, [0, 1, 2])
    assert run.forms()[1].urgent
    assert run.forms()[1].because == "a connection between workers broke"


def test_a_broken_connection_that_a_death_explains_costs_one_generation() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.broken(0, lost=2)
    run.die(2)
    run.broken(1, lost=2, generation=1)
    run.later(5)
    assert (run.generation, run.members) == (2, [0, 1])


def test_a_broken_connection_to_a_host_that_hung_up_drops_it_at_once() -> None:
    run = with_two_hosts()
    run.quorum.disconnected("b", run.now_s)
    run.broken(0, lost=2)
    run.broken(1, lost=3)
    assert run.members == [0, 1]
    assert run.removed() == [(2, "unreachable"), (3, "unreachable")]


def break_again_and_again(run: Pretend, pair: tuple[int, int], pause_s: float = 1.0, times: int = 5) -> None:
    one, other = pair
    for _ in range(times):
        run.broken(one, lost=other)
        run.broken(other, lost=one)
        run.later(pause_s)
        run.form()


def test_of_two_workers_between_whom_connections_break_again_and_again_one_is_given_up() -> None:
    run = Pretend(least=1, most=3).begin(3)
    break_again_and_again(run, (1, 2), times=4)
    assert run.members == [0, 1, 2]
    break_again_and_again(run, (1, 2), times=1)
    assert [kill.worker for kill in run.told(m.Kill)] == [2]
    assert run.members == [0, 1]
    assert run.removed() == [(2, "unreachable")]
    run.die(2, because="its connections to other workers break again and again")
    assert [spawn.replaces for spawn in run.told(m.Spawn)] == [2]
    assert run.removed() == [(2, "unreachable")]


def test_the_one_that_others_name_too_is_given_up() -> None:
    run = Pretend(least=1, most=3).begin(3)
    for _ in range(5):
        run.broken(0, lost=1)
        run.broken(2, lost=1)
        run.broken(1, lost=2)
        run.later(1)
        run.form()
    assert [kill.worker for kill in run.told(m.Kill)] == [1]


def test_breaks_far_apart_are_accidents() -> None:
    run = Pretend(least=1, most=3).begin(3)
    for step in range(8):
        run.doing(0, "computing", step=step)
        break_again_and_again(run, (1, 2), pause_s=20.0, times=1)
    assert run.told(m.Kill) == []
    assert run.members == [0, 1, 2]


def test_breaks_without_a_step_between_them_are_no_accidents_however_slow() -> None:
    run = Pretend(least=1, most=3).begin(3)
    run.doing(0, "computing", step=3)
    run.later(0.5)
    break_again_and_again(run, (1, 2), pause_s=20.0, times=5)
    assert [kill.worker for kill in run.told(m.Kill)] == [2]


def test_breaks_between_ever_other_workers_are_accidents() -> None:
    run = Pretend(least=1, most=4).begin(4)
    for pair in ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)):
        break_again_and_again(run, pair, times=1)
    assert run.told(m.Kill) == []


def test_a_slow_worker_is_named_and_gets_fewer_microbatches() -> None:
    run = Pretend(least=1, most=4, microbatches=16).begin(4)
    for worker, seconds in enumerate([0.1, 0.1, 0.1, 0.3]):
        run.doing(worker, "computing", per_microbatch_s=seconds)
    run.later(8)
    assert run.generation == 2
    assert run.quorum.current.shares == [5, 5, 5, 1]
    assert not run.forms()[0].urgent
    assert run.forms()[0].because == "worker 3 is slow"
    (slow,) = run.recorded(events.WorkerSlow)
    assert (slow.who, slow.microbatches) == (3, 1)
    assert slow.factor == pytest.approx(3.0, abs=0.1)
    run.form()
    run.later(60)
    assert run.generation == 2, "the new division stays"


def test_a_worker_that_is_fast_again_gets_its_microbatches_back() -> None:
    run = Pretend(least=1, most=2, microbatches=8).begin(2)
    run.doing(0, "computing", per_microbatch_s=0.1)
    run.doing(1, "computing", per_microbatch_s=0.3)
    run.later(8)
    assert run.quorum.current.shares == [6, 2]
    run.form()
    run.doing(1, "computing", per_microbatch_s=0.1)
    run.later(8)
    assert run.quorum.current.shares == [4, 4]
    assert run.forms()[0].because == "speeds have changed"


@pytest.mark.parametrize(
    ("speeds", "rules"),
    [
        ([0.1, 0.11], {}),  # not worth a re-forming
        ([0.1, 0.0], {}),  # unknown
        ([0.1, 0.3], {"balance": False}),
    ],
)
def test_the_division_stays_when_a_change_is_not_worth_it(speeds: list[float], rules: dict[str, bool]) -> None:
    run = Pretend(least=1, most=2, microbatches=8, **rules).begin(2)
    for worker, seconds in enumerate(speeds):
        run.doing(worker, "computing", per_microbatch_s=seconds)
    run.later(60)
    assert run.generation == 1


def test_a_short_hiccup_changes_nothing() -> None:
    run = Pretend(least=1, most=2, microbatches=8).begin(2)
    for _ in range(10):
        run.doing(0, "computing", per_microbatch_s=0.1)
        run.doing(1, "computing", per_microbatch_s=0.3)
        run.later(1.5)
        run.doing(1, "computing", per_microbatch_s=0.1)
        run.later(1.5)
    assert run.generation == 1


def test_a_slow_worker_is_named_once_also_where_no_division_is_better() -> None:
    run = Pretend(least=1, most=2, microbatches=2).begin(2)
    run.doing(0, "computing", per_microbatch_s=0.1)
    run.doing(1, "computing", per_microbatch_s=0.3)
    run.later(60)
    assert run.generation == 1
    assert [(slow.who, slow.microbatches) for slow in run.recorded(events.WorkerSlow)] == [(1, 1)]


def test_the_division_of_a_new_generation_follows_known_speeds_and_takes_a_joiner_for_usual() -> None:
    run = Pretend(least=1, most=3, microbatches=12).begin(2)
    run.doing(0, "computing", per_microbatch_s=0.1)
    run.doing(1, "computing", per_microbatch_s=0.4)
    run.hear(m.Started(worker=2), "a")
    run.later(1)
    run.ready(2)
    run.later(0.5)
    assert run.members == [0, 1, 2]
    assert run.quorum.current.shares == [8, 1, 3]
