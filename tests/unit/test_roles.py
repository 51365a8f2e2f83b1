# SPDX-License-Identifier: Apache-2.0
"""Who computes and who serves: as many servers as asked for, fewer when many are missing, never at workers' expense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pretend_run import Pretend

from unisono.elastic.roles import assigned, servers_among
from unisono.elastic.roster import Current, Worker
from unisono.wire import messages as m


@pytest.mark.parametrize(
    ("count", "servers", "target", "least", "serving"),
    [
        (5, 1, 4, 1, 1),
        (6, 2, 4, 1, 2),
        (7, 3, 4, 1, 3),
        (4, 0, 4, 1, 0),  # nobody serves only: everybody does both
        (4, 1, 4, 1, 1),  # one is missing: a worker
        (3, 2, 4, 1, 1),  # half are missing, half the servers are left
        (2, 2, 4, 1, 1),
        (1, 2, 4, 1, 0),  # alone it does both
        (3, 1, 2, 3, 0),  # the minimum computes before anybody serves
        (4, 3, 3, 3, 1),
        (0, 2, 4, 1, 0),
    ],
)
def test_how_many_serve(count: int, servers: int, target: int, least: int, serving: int) -> None:
    assert servers_among(count, least, target, servers) == serving


@given(st.integers(0, 20), st.integers(0, 6), st.integers(1, 10), st.integers(0, 10))
def test_there_are_never_too_few_workers_nor_more_servers_than_asked_for(
    count: int, servers: int, target: int, least: int
) -> None:
    serving = servers_among(count, least, target, servers)
    assert 0 <= serving <= servers
    assert count - serving >= min(count, max(1, least))
    if servers and count > max(1, least):
        assert serving >= 1
    if count >= target + servers and target >= max(1, least):
        assert serving == servers
    if count <= target + servers and serving and target >= max(1, least):
        assert count - serving <= target, "more would compute than the run wants"


def team(*numbers: int) -> list[Worker]:
    return [Worker(number, "a") for number in numbers]


def numbers(workers: list[Worker]) -> list[int]:
    return [worker.number for worker in workers]


def roles(members: list[Worker], before: Current, servers: int, target: int = 3) -> tuple[list[int], list[int]]:
    computing, serving = assigned(members, before, servers_among(len(members), 1, target, servers))
    return numbers(computing), numbers(serving)


def test_at_the_start_the_newest_serve() -> None:
    assert roles(team(0, 1, 2, 3, 4), Current(), 2) == ([0, 1, 2], [3, 4])


def test_who_serves_goes_on_serving() -> None:
    before = Current(1, [0, 2, 3, 1, 4], [2, 2, 2, 0, 0])
    assert before.servers == {1, 4}
    assert roles(team(0, 1, 2, 3, 4), before, 2) == ([0, 2, 3], [1, 4])
    assert roles(team(0, 1, 2, 4, 7), before, 2) == ([0, 2, 7], [1, 4])


def test_a_lost_server_is_replaced_by_the_newest_who_is_here() -> None:
    before = Current(1, [0, 1, 2, 3, 4], [2, 2, 2, 0, 0])
    assert roles(team(0, 1, 2, 3), before, 2) == ([0, 1, 2], [3]), "with one missing, one server is fair"
    assert roles(team(0, 1, 2, 3, 5), before, 2) == ([0, 1, 2], [3, 5])


def test_when_too_many_serve_some_compute_again() -> None:
    before = Current(1, [0, 1, 2, 3, 4], [2, 2, 2, 0, 0])
    assert roles(team(0, 3, 4), before, 2) == ([0, 4], [3])
    assert roles(team(3, 4), before, 2) == ([4], [3])
    assert roles(team(4), before, 2) == ([4], [])


@given(st.sets(st.integers(0, 12), min_size=1), st.sets(st.integers(0, 12)), st.integers(0, 4), st.integers(1, 6))
def test_everybody_has_exactly_one_role_and_keeps_the_order(
    here: set[int], served: set[int], servers: int, target: int
) -> None:
    before = Current(3, sorted(served), [0] * len(served))
    members = team(*sorted(here, key=lambda number: (number % 3, number)))
    computing, serving = roles(members, before, servers, target)
    assert sorted(computing + serving) == sorted(here)
    order = numbers(members)
    assert computing == [number for number in order if number in computing]
    assert serving == [number for number in order if number in serving]
    stayed = [number for number in serving if number in served]
    assert len(stayed) == min(len(serving), len(served & here)), "new ones serve only where old ones do not suffice"


# --- where servers are wished for


def on(host: str, *numbers: int) -> list[Worker]:
    return [Worker(number, host) for number in numbers]


@pytest.mark.parametrize(
    ("wishes", "serving"),
    [
        ({}, [4, 5]),  # the newest, wherever they are
        ({"a": 2}, [2, 3]),
        ({"b": 1, "a": 2}, [3, 5]),  # what b takes, a need not
        ({"b": 2, "a": 2}, [4, 5]),
        ({"b": 1, "c": 1, "a": 0}, [4, 5]),  # of c nobody is here: the next best
        ({"b": 9}, [4, 5]),
        ({"b": 0, "a": 0}, [4, 5]),
    ],
)
def test_servers_are_where_hosts_wish_for_them(wishes: dict[str, int], serving: list[int]) -> None:
    members = [*on("a", 0, 1, 2, 3), *on("b", 4, 5)]
    computing, found = assigned(members, Current(), 2, wishes)
    assert numbers(found) == serving
    assert sorted(numbers(computing + found)) == [0, 1, 2, 3, 4, 5]


def test_of_a_host_that_wishes_for_servers_those_go_on_that_serve() -> None:
    members = [*on("a", 0, 1), *on("b", 2, 3, 4)]
    before = Current(1, [0, 1, 3, 4, 2], [1, 1, 1, 1, 0])
    computing, serving = assigned(members, before, 1, {"b": 1, "a": 1})
    assert (numbers(computing), numbers(serving)) == ([0, 1, 3, 4], [2])


# --- in a run


def test_a_host_that_joins_takes_the_server_and_the_owners_computes_instead() -> None:
    run = Pretend(least=1, most=3, servers=1, servers_here=1).begin(3)
    assert shares(run) == {0: 2, 1: 1, 2: 0}
    assert run.join("b", room=1, servers=1) == [3]
    run.ready(3)
    assert shares(run) == {0: 1, 1: 1, 2: 1, 3: 0}
    run.form()
    run.die(3)
    assert shares(run) == {0: 2, 1: 1, 2: 0}, "the newest that the owner has"
    assert run.obey_spawns() == [4]
    run.form()
    run.ready(4)
    assert shares(run) == {0: 1, 1: 1, 2: 1, 4: 0}, "its place is on b"


def test_a_run_that_starts_none_begins_without_and_has_servers_once_they_come() -> None:
    run = Pretend(least=2, most=2, servers=2).begin(2)
    assert all(shares(run).values()), "who computes also serves"
    assert run.join("b", room=2, servers=2) == [2, 3]
    run.ready(2, 3)
    assert [number for number, share in shares(run).items() if not share] == [2, 3]


def test_a_host_whose_server_would_be_one_too_many_brings_workers() -> None:
    run = Pretend(least=1, most=4, servers=1).begin(2)
    run.join("b", room=2, servers=0)
    run.ready(2, 3)
    assert shares(run)[1] == 0, "who serves goes on serving"


def test_a_coordinator_that_comes_back_remembers_who_wished_for_servers() -> None:
    run = Pretend(least=1, most=3, servers=1, servers_here=1).begin(3)
    run.join("b", room=1, servers=1)
    run.ready(3)
    run.form()
    run.restart_coordinator()
    run.hello()
    run.hello("b", room=1, servers=1)
    run.die(0)
    assert [number for number, share in shares(run).items() if not share] == [3]


def shares(run: Pretend) -> dict[int, int]:
    current = run.quorum.current
    return dict(zip(current.members, current.shares, strict=True))


def test_a_run_starts_with_its_servers_behind_the_workers() -> None:
    run = Pretend(least=1, most=4, servers=2)
    run.started(*range(6))
    run.hello(room=6)
    run.ready(*range(6))
    assert run.members == [0, 1, 2, 3, 4, 5]
    assert shares(run) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0, 5: 0}
    assert run.forms()[0].ranges == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 4], [4, 4]]


def test_a_lost_worker_leaves_the_servers_as_they_are() -> None:
    run = Pretend(least=1, most=4, servers=1).begin(5)
    run.die(2)
    assert shares(run) == {0: 2, 1: 1, 3: 1, 4: 0}
    assert run.obey_spawns() == [5]
    run.form()
    run.ready(5)
    assert shares(run) == {0: 1, 1: 1, 3: 1, 5: 1, 4: 0}
    assert run.members[-1] == 4


def test_a_lost_server_is_replaced_at_once_by_a_worker_who_is_here() -> None:
    run = Pretend(least=1, most=4, servers=1).begin(5)
    run.die(4)
    assert shares(run) == {0: 2, 1: 1, 2: 1, 3: 0}
    run.obey_spawns()
    run.form()
    run.ready(5)
    assert shares(run) == {0: 1, 1: 1, 2: 1, 5: 1, 3: 0}, "who serves goes on serving"


def test_the_last_one_left_computes_and_serves() -> None:
    run = Pretend(least=1, most=2, servers=1, max_restarts=0).begin(3)
    run.die(0)
    assert shares(run) == {1: 2, 2: 0}
    run.form()
    run.die(1)
    assert shares(run) == {2: 2}


def test_servers_do_not_count_as_workers_for_scale_and_are_not_sent_away() -> None:
    run = Pretend(least=1, most=4, servers=1).begin(5)
    answer = run.command("scale", 2)
    assert answer.ok
    assert answer.text == "from 4 to 2 workers at the next step boundary"
    run.later(1)
    assert shares(run) == {0: 2, 1: 2, 4: 0}
    run.form()
    run.go(2, 3)
    answer = run.command("scale", 3)
    assert answer.text == "from 2 to 3 workers at the next step boundary"
    assert run.obey_spawns() == [5]


def test_the_overview_says_who_serves() -> None:
    run = Pretend(least=1, most=2, servers=1).begin(3)
    rows = run.command("ps").data["workers"]
    assert {row["worker"]: row["role"] for row in rows} == {0: "worker", 1: "worker", 2: "server"}


def test_no_more_compute_than_there_are_microbatches() -> None:
    """Four workers may be wanted where a step has only two microbatches: two compute, whoever serves."""
    run = Pretend(least=1, most=4, microbatches=2, servers=2).begin(6)
    current = run.quorum.current
    assert [share for share in current.shares if share] == [1, 1]
    assert len(current.servers) == 2
    assert sum(current.shares) == 2


@pytest.mark.parametrize("lost", range(6))
def test_whoever_is_lost_every_microbatch_is_computed(lost: int) -> None:
    run = Pretend(least=1, most=4, microbatches=8, servers=2).begin(6)
    run.die(lost)
    current = run.quorum.current
    assert sum(current.shares) == 8
    assert lost not in current.members
    forms = run.forms()
    assert all(form.ranges == forms[current.members[0]].ranges for form in forms.values())
    positions = [place for bounds in forms[current.members[0]].ranges for place in bounds]
    assert positions == sorted(positions)
    assert (positions[0], positions[-1]) == (0, 8)


def test_a_coordinator_that_comes_back_knows_who_serves() -> None:
    run = Pretend(least=1, most=2, servers=1).begin(3)
    run.restart_coordinator()
    run.hello()
    run.later(1)
    run.die(1)
    assert shares(run) == {0: 2, 2: 0}
    assert isinstance(run.told(m.Form)[0], m.Form)
