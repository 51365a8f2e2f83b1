# SPDX-License-Identifier: Apache-2.0
"""More and fewer parameter servers while a run trains: by ``unisono scale RUN --servers S``, and by hosts that join."""

from __future__ import annotations

import pytest
from pretend_run import Pretend

from unisono.elastic import roles
from unisono.elastic.roster import FIXED
from unisono.wire import messages as m


def served(workers: int = 2, servers: int = 1, copies: int = 1, **rules: int) -> Pretend:
    """All are on the owner's host; the servers have the last numbers."""
    run = Pretend(1, workers, 8, servers=servers, servers_here=servers, copies=copies, **rules)
    return run.begin(workers + servers)


def scale(run: Pretend, workers: int = 0, servers: int | None = None) -> m.Answer:
    run.hear(m.Command(what="scale", number=workers, servers=servers), "operator")
    (answer,) = run.told(m.Answer)
    run.orders = [order for order in run.orders if order.message is not answer]
    return answer


def serving(run: Pretend) -> list[int]:
    current = run.quorum.current
    return [number for number in current.members if number in current.servers]


def computing(run: Pretend) -> list[int]:
    return [number for number in run.members if number not in serving(run)]


def settle(run: Pretend) -> None:
    """Everybody does as told."""
    run.ready(*run.obey_spawns())
    run.form()
    for form in run.told(m.Form):
        if form.worker not in form.members and "gone" not in run.said[form.worker]:
            run.go(form.worker)
    run.orders.clear()
    run.later(2)


def test_more_servers_are_started_and_serve_as_soon_as_they_are_there() -> None:
    run = served(workers=2, servers=1)
    assert scale(run, servers=3).text == "from 1 to 3 servers at the next step boundary"
    new = run.obey_spawns()
    assert new == [3, 4]
    assert run.generation == 1, "until they are there, all goes on as it is"
    run.later(30)
    assert run.generation == 1
    run.ready(3)
    assert (computing(run), serving(run)) == ([0, 1], [2, 3])
    run.form()
    run.ready(4)
    assert (computing(run), serving(run)) == ([0, 1], [2, 3, 4])
    assert not any(form.urgent for form in run.told(m.Form) if form.worker < 3), "at a step boundary"


def test_servers_that_are_not_needed_any_more_leave_and_workers_stay_what_they_are() -> None:
    run = served(workers=2, servers=3)
    assert scale(run, servers=1).text == "from 3 to 1 servers at the next step boundary"
    assert (computing(run), serving(run)) == ([0, 1], [2])
    assert {form.worker for form in run.told(m.Form)} == {0, 1, 2, 3, 4}, "those who leave hand over what they hold"
    assert run.told(m.Kill) == run.told(m.Depart) == []
    run.form()
    run.go(3, 4)
    assert run.removed() == [(3, "left"), (4, "left")]
    assert run.quorum.workers[3].leaving == "the run was scaled to 1 server"
    assert run.told(m.Spawn) == [], "nobody is missed"


@pytest.mark.parametrize(
    ("before", "after", "members", "servers"),
    [
        ((2, 3), (4, 1), [0, 1, 3, 4, 2], [2]),  # two who served compute
        ((4, 1), (2, 3), [0, 1, 2, 3, 4], [2, 3, 4]),  # two who computed serve: the newest
        ((3, 1), (2, 3), [0, 1, 2, 3, 4], [2, 3, 4]),  # one of them, and one who comes
        ((2, 2), (1, 1), [0, 2], [2]),
        ((2, 1), (3, 0), [0, 1, 2], []),  # whoever computes serves
        ((2, 0), (2, 2), [0, 1, 2, 3], [2, 3]),
        ((1, 2), (4, 4), [0, 5, 6, 7, 1, 2, 3, 4], None),
    ],
)
def test_workers_and_servers_are_changed_together(
    before: tuple[int, int], after: tuple[int, int], members: list[int], servers: list[int] | None
) -> None:
    run = served(*before)
    answer = scale(run, *after)
    words = f"from {before[0]} to {after[0]} workers and from {before[1]} to {after[1]} servers"
    assert answer.text == f"{words} at the next step boundary"
    settle(run)
    assert len(run.members) == sum(after)
    assert sorted(run.members) == sorted(members)
    assert servers is None or (run.members, serving(run)) == (members, servers)
    assert (len(computing(run)), len(serving(run))) == after
    generation = run.generation
    run.later(30)
    assert run.generation == generation, "and it stays so"


def test_when_only_the_roles_change_nobody_comes_or_goes_and_the_record_says_why() -> None:
    run = served(workers=4, servers=1)
    scale(run, 2, 3)
    assert run.told(m.Spawn) == []
    assert run.removed() == []
    assert {form.because for form in run.told(m.Form)} == {"3 servers instead of 1"}
    assert not any(form.urgent for form in run.told(m.Form))


def test_those_that_are_only_starting_are_not_started_any_more() -> None:
    run = served(workers=2, servers=1)
    scale(run, servers=3)
    new = run.obey_spawns()
    scale(run, servers=1)
    assert [kill.worker for kill in run.told(m.Kill)] == new
    assert run.generation == 1


def test_a_server_that_dies_after_the_scaling_is_replaced_up_to_the_new_number() -> None:
    run = served(workers=2, servers=1)
    scale(run, servers=2)
    settle(run)
    assert serving(run) == [2, 3]
    run.die(3)
    settle(run)
    assert (computing(run), serving(run)) == ([0, 1], [2, 4])


def test_a_coordinator_that_comes_back_before_the_servers_are_there_knows_that_they_are_wanted() -> None:
    run = served(workers=2, servers=1)
    scale(run, servers=2)
    run.restart_coordinator()
    run.orders.clear()  # the order to start it was lost with the connection
    run.hello()
    run.ready(*run.obey_spawns())
    assert (computing(run), serving(run)) == ([0, 1], [2, 3])
    scale(run, servers=1)
    run.restart_coordinator()
    run.orders.clear()
    run.hello()
    settle(run)
    assert (computing(run), serving(run)) == ([0, 1], [2])


def test_while_servers_are_on_their_way_a_slow_worker_upsets_nothing() -> None:
    """Microbatches are divided anew when all that were asked for are there."""
    run = served(workers=4, servers=1, balance=True)
    scale(run, servers=8)
    run.obey_spawns()
    for worker in range(4):
        run.doing(worker, "computing", per_microbatch_s=0.5 if worker == 1 else 0.1)
    run.later(20)
    assert run.generation == 1
    assert (computing(run), serving(run)) == ([0, 1, 2, 3], [4])


@pytest.mark.parametrize(
    ("copies", "workers", "servers", "words"),
    [
        (0, 0, 2, ["2 servers", "--strategy ps --servers 2"]),
        (0, 0, 0, ["0 servers", "no slices", "--strategy ps --servers 1"]),
        (2, 0, 1, ["1 server:", "2 copies", "--copies 2", "ask for 2 or more"]),
        (2, 0, 0, ["0 servers", "2 copies"]),
        (1, 0, -1, ["-1 servers"]),
        (1, 9, 2, ["9 workers", "1 to 8"]),
        (1, 1, -3, ["-3 servers"]),
    ],
)
def test_a_number_of_servers_that_cannot_be_is_refused_with_the_cure(
    copies: int, workers: int, servers: int, words: list[str]
) -> None:
    run = served(2, 3 if copies else 0, copies=copies)
    before = run.quorum.durable()
    answer = scale(run, workers, servers)
    assert not answer.ok
    assert all(word in answer.text for word in words), answer.text
    run.later(5)
    assert run.quorum.durable() == before, "nothing of it is done"


def test_with_as_many_servers_as_copies_there_may_be_fewer() -> None:
    run = served(2, 3, copies=2)
    assert scale(run, servers=2).ok
    assert serving(run) == [2, 3]


@pytest.mark.parametrize(("least", "is_possible"), [(1, False), (2, True)])
def test_without_servers_workers_hold_the_copies_if_there_are_always_enough(least: int, is_possible: bool) -> None:
    run = Pretend(least, 2, 8, servers=2, servers_here=2, copies=2).begin(4)
    assert scale(run, servers=0).ok == is_possible


def test_a_run_whose_members_must_stay_the_same_keeps_its_servers() -> None:
    run = Pretend(2, 2, 2, servers=1, copies=1)
    run.facts[FIXED] = "with unisono.kvstore or unisono.ps"
    run.begin(3)
    answer = scale(run, servers=2)
    assert not answer.ok
    assert "with unisono.kvstore" in answer.text
    run.join("b", room=1, servers=1)
    assert run.quorum.roster.servers == 1


def test_a_run_that_is_about_to_end_is_not_scaled() -> None:
    run = served()
    run.command("stop", because="stopped by unisono stop")
    assert not scale(run, servers=2).ok
    assert run.quorum.roster.servers == 1


def test_the_overview_says_how_many_servers_are_wanted() -> None:
    run = served(2, 1)
    scale(run, servers=3)
    assert (run.command("ps").data["target"], run.command("ps").data["servers"]) == (2, 3)


# --- hosts that bring servers


@pytest.mark.parametrize(
    ("here", "joins", "wanted"),
    [
        (3, [("b", 1)], 2),  # the run has all it wants: one more
        (3, [("b", 2)], 3),
        (2, [("b", 1)], 1),  # a worker is missing: the owner's server becomes that
        (2, [("b", 2)], 2),
        (3, [("b", 1), ("c", 1)], 3),
        (2, [("b", 1), ("c", 1)], 2),
        (3, [("b", 0)], 1),
    ],
)
def test_servers_that_a_host_brings_beyond_those_of_the_run_are_added(
    here: int, joins: list[tuple[str, int]], wanted: int
) -> None:
    run = Pretend(1, 2, 8, servers=1, servers_here=1, copies=1, open_door=True).begin(here)
    for host, servers in joins:
        run.ready(*run.join(host, room=servers, servers=servers))
        run.form()
    assert run.quorum.roster.servers == wanted
    there = [run.host_of[number] for number in serving(run)]
    assert [there.count(host) for host, _ in joins] == [servers for _, servers in joins]
    assert (len(computing(run)), len(serving(run))) == (2, wanted)


@pytest.mark.parametrize(("here", "wanted"), [(3, 2), (2, 1)])
def test_a_host_that_comes_again_or_in_place_of_one_that_fell_silent_adds_nothing(here: int, wanted: int) -> None:
    run = Pretend(1, 2, 8, servers=1, servers_here=1, copies=1, open_door=True).begin(here)
    run.ready(*run.join("b", room=1, servers=1))
    run.form()
    run.hello("b", room=1, servers=1)
    assert run.quorum.roster.servers == wanted
    run.silent.add("b")
    run.later(10)
    run.form()
    (new,) = run.join("c", room=1, servers=1)
    run.ready(new)
    assert run.quorum.roster.servers == wanted
    assert new in serving(run)


def test_scaled_down_the_run_keeps_the_servers_that_hosts_have_brought() -> None:
    run = Pretend(1, 2, 8, servers=2, servers_here=2, copies=1, open_door=True).begin(4)
    run.ready(*run.join("b", room=1, servers=1))
    run.form()
    assert serving(run) == [2, 3, 4]
    scale(run, servers=1)
    assert serving(run) == [4]
    assert computing(run) == [0, 1]


def test_with_fewer_servers_a_worker_elsewhere_goes_on_and_the_one_who_served_leaves() -> None:
    run = Pretend(1, 2, 8, servers=2, servers_here=2, copies=1, open_door=True).begin(3)
    run.ready(*run.join("b", room=1))
    run.form()
    assert (computing(run), serving(run)) == ([0, 3], [1, 2])
    scale(run, servers=1)
    assert (computing(run), serving(run)) == ([0, 3], [1])


@pytest.mark.parametrize(("copies", "servers", "is_taken"), [(1, 1, True), (2, 2, True), (2, 1, False), (0, 1, False)])
def test_a_host_with_more_servers_than_the_run_can_have_is_told_so(copies: int, servers: int, is_taken: bool) -> None:
    """Not taken in as an ordinary machine, with its --servers forgotten."""
    run = Pretend(2, 2, 8, servers=0, copies=copies).begin(2)
    why = roles.why_not_bring(run.quorum.roster, "guest", servers)
    assert (why == "") == is_taken
    assert bool(roles.brought(run.quorum.roster, "guest", servers)) == is_taken
