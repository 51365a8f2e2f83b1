# SPDX-License-Identifier: Apache-2.0
"""Whatever is said in whatever order: the quorum never orders nonsense, forgets nothing, and comes to rest again."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_run import Pretend

from unisono.core import events
from unisono.elastic import roles
from unisono.elastic.orders import Order
from unisono.elastic.quorum import Quorum
from unisono.wire import messages as m

HOSTS = ("a", "b", "c")
numbers = st.integers(0, 9)
hosts = st.sampled_from(HOSTS)


def about(*names: str) -> st.SearchStrategy[tuple[str, int]]:
    return st.tuples(st.sampled_from(names), numbers)


ACTIONS = st.one_of(
    about("ready", "form", "form", "die", "die at a place", "leave", "go", "freeze", "thaw"),
    about("spawns", "all ready", "all form", "later", "much later", "restart"),
    about("hello", "silence", "sound", "hang up"),
    about("turn", "turn done", "stale form", "examined", "odd"),
    st.tuples(st.sampled_from(("broken", "accuse", "busy", "waits", "computes", "slow")), numbers, numbers),
    st.tuples(st.just("scale"), st.integers(-1, 9)),
    st.tuples(st.just("scale servers"), st.integers(-1, 4), st.integers(0, 9)),
    about("leave host", "ps"),
)
RARE = st.one_of(about("finished", "stop", "fatal", "over"))


class Checked(Pretend):
    """A pretended run that looks at every order as it is given."""

    def __init__(self, least: int, most: int, microbatches: int, open_door: bool, servers: int) -> None:
        limits = {"max_restarts": 4, "hang_s": 5.0, "rejoin_s": 40.0}
        serving = {"servers": servers, "servers_here": servers, "copies": 1}
        super().__init__(least, most, microbatches, open_door=open_door, balance=True, **limits, **serving)
        self.published: dict[int, list[int]] = {}
        self.reported: dict[int, str] = {}
        self.ended_before = False

    def take(self, orders: list[Order]) -> None:
        super().take(orders)
        roster = self.quorum.roster
        for order in orders:
            assert not (self.ended_before and isinstance(order.message, m.Form | m.Spawn)), "the run is over"
            if isinstance(order.message, m.Form):
                self._check_form(order, order.message)
            elif isinstance(order.message, m.Record):
                self._check_record(events.from_dict(order.message.event))
        self.ended_before |= roster.is_over
        assert roster.restarts <= roster.rules.max_restarts
        assert roster.current.generation >= max(self.published, default=0)

    def _check_form(self, order: Order, form: m.Form) -> None:
        roster = self.quorum.roster
        assert order.to == roster.workers[form.worker].host
        if form.generation in self.published:  # told again
            assert form.members == self.published[form.generation], "two of the same number"
            return
        assert form.worker in form.members or form.worker in roster.current.parting
        assert form.generation == max(self.published, default=0) + 1
        self.published[form.generation] = form.members
        members = [roster.workers[number] for number in form.members]
        assert all(worker.ready and worker.is_here and not worker.finished for worker in members)
        assert not any(roster.is_away(worker) for worker in members)
        assert roster.winds_up or len(members) >= roster.rules.min
        assert not roster.under_way or any(worker.holds_state for worker in members)
        assert len(set(form.members)) == len(form.members) == len(form.addresses) == len(form.ranges) > 0
        bounds = [0, *(last for _, last in form.ranges)]
        assert [first for first, _ in form.ranges] == bounds[:-1]
        assert bounds[-1] == roster.microbatches
        serving = roles.servers_of(roster, len(members))
        assert [last > first for first, last in form.ranges] == [
            place < len(members) - serving for place in range(len(members))
        ]
        assert len(members) - serving >= min(len(members), roster.rules.min)
        for number in form.members:
            self.reported.pop(number, None)

    def _check_record(self, event: events.Event | None) -> None:
        if isinstance(event, events.WorkerRemoved):
            assert self.reported.get(event.who, "") in ("", "unreachable"), f"{event} was told before"
            assert self.reported.get(event.who) != event.how
            self.reported[event.who] = event.how

    def known(self, number: int) -> int | None:
        """One of the workers that there are."""
        there = sorted(self.said)
        return there[number % len(there)] if there else None

    # --- acts

    def act(self, what: str, one: int, other: int = 0) -> None:
        worker, second = self.known(one), self.known(other)
        host = HOSTS[one % len(HOSTS)]
        if what in ("later", "much later"):
            self.later((one + 1) / 4 if what == "later" else 6.0 * one)
        elif what == "spawns":
            self.obey_spawns()
            self.orders.clear()
        elif what == "restart":
            self.restart_coordinator()
        elif what in ("hello", "silence", "sound", "hang up", "leave host"):
            self._host_acts(what, host, one)
        elif what == "scale servers":
            self.hear(m.Command(what="scale", number=other, servers=one), "operator")
        elif what in ("scale", "stop", "ps", "over"):
            self.hear(m.Command(what=what, number=one, because="asked"), "a" if what == "over" else "operator")
        elif what == "all ready":
            self.ready(*self.said)
        elif what == "all form" and self.generation:
            self.form()
        elif worker is not None and second is not None:
            self._worker_acts(what, worker, second, one)

    def _host_acts(self, what: str, host: str, number: int) -> None:
        if what == "hello":
            self.hello(host, room=1 + number % 3, servers=number // 3 % 3)
        elif what == "silence":
            self.silent.add(host)
        elif what == "sound":
            self.silent.discard(host)
        elif what == "hang up":
            self.quorum.disconnected(host, self.now_s)
        else:
            self.hear(m.Command(what="leave", because="asked"), host)

    def _worker_acts(self, what: str, worker: int, second: int, number: int) -> None:
        if what == "ready":
            self.ready(worker)
        elif what == "form" and self.generation:
            self.form(worker)
        elif what == "stale form":
            self.hear(m.Formed(worker=worker, generation=max(1, self.generation - number % 3)))
        elif what in ("die", "die at a place", "fatal"):
            self.die(worker, place=f"line {number % 4}" if what == "die at a place" else "", fatal=what == "fatal")
        elif what == "leave":
            self.leave(worker)
        elif what == "go":
            self.go(worker)
        elif what == "freeze":
            self.frozen.add(worker)
        elif what == "thaw":
            self.frozen.clear()
        elif what == "broken":
            self.broken(worker, lost=second)
        elif what == "accuse":
            self.hear(m.Accuse(worker=worker, who=second, generation=self.generation, why="other weights"))
        elif what == "finished":
            self.hear(m.Finished(worker=worker))
        elif what in ("turn", "turn done"):
            self.hear(m.Turn(worker=worker, number=number % 2, done=what == "turn done"))
        elif what == "examined":
            self.hear(m.Examined(worker=worker, where="line 3"))
        elif what in ("busy", "waits", "computes", "slow"):
            doing = "re-forming" if number % 2 else "adding up the gradients"
            seconds = 0.4 if what == "slow" else 0.1
            self.doing(worker, doing, waits=what == "waits", busy=what == "busy", per_microbatch_s=seconds, step=number)
        elif what == "odd":
            self.hear(m.Status(worker=99), "nobody")
            self.hear(m.Gone(worker=99, exit_code=1, because="unknown"), "a")

    # --- peace

    def obey(self) -> None:
        """Every worker and host does what it was told, and nothing else happens."""
        self.silent, self.frozen = set(), set()
        self.statuses.clear()
        for host in HOSTS:
            if host == "a" or host in self.quorum.hosts:
                self.hello(host)
        for order in list(self.orders):
            message = order.message
            number = getattr(message, "worker", -1)
            if "gone" in self.said.get(number, {}):
                continue
            if isinstance(message, m.Depart) or (isinstance(message, m.Form) and number not in message.members):
                self.go(number)
            elif isinstance(message, m.Kill):
                self.die(number)
        self.obey_spawns()
        self.orders.clear()
        living = [number for number in self.said if "gone" not in self.said[number]]
        self.ready(*[number for number in living if not self.quorum.workers[number].ready])
        if self.generation:
            self.form()
        self.later(1)


def play(run: Checked, script: Iterable[tuple[str, int] | tuple[str, int, int]]) -> None:
    for action in script:
        run.act(*action)
        before = run.quorum.durable()
        again = Quorum(run.rules)
        again.restore(json.loads(json.dumps(before)), run.now_s)
        assert again.durable() == before


runs = st.builds(
    Checked,
    least=st.integers(1, 3),
    most=st.integers(3, 5),
    microbatches=st.integers(5, 9),
    open_door=st.booleans(),
    servers=st.integers(0, 2),
)


@given(runs, st.lists(ACTIONS, max_size=40))
def test_from_the_first_hello_on_nothing_that_is_said_leads_to_a_senseless_order(
    run: Checked, script: list[tuple[str, int]]
) -> None:
    run.started(0, 1, 2)
    play(run, script)


@given(runs, st.lists(st.one_of(ACTIONS, ACTIONS, RARE), max_size=40))
def test_in_the_middle_of_a_run_nothing_that_is_said_leads_to_a_senseless_order(
    run: Checked, script: list[tuple[str, int]]
) -> None:
    run.begin(3)
    play(run, script)


@settings(max_examples=30)
@given(runs, st.lists(ACTIONS, max_size=25))
def test_when_everybody_does_as_told_the_run_comes_to_rest_or_to_an_end(
    run: Checked, script: list[tuple[str, int]]
) -> None:
    run.begin(3)
    play(run, script)
    for _ in range(8):
        run.obey()
    run.later(31)  # the longest pause before a worker is replaced
    for _ in range(8):
        run.obey()
    roster = run.quorum.roster
    if roster.is_over or roster.winds_up:
        return
    if roster.short_since_s is not None or not run.generation:
        assert roster.rules.open_door, "it waits, and nobody can come"
        return
    generation = run.generation
    assert roster.is_formed
    assert all(worker.is_able for worker in roster.members)
    assert len(roster.members) >= roster.rules.min
    assert len(roster.members) == min(roster.limit, len(roster.able)), "whoever can help does"
    assert roles.are_settled(roster)
    run.obey()
    assert run.generation == generation, "and stays at rest"
