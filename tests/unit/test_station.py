# SPDX-License-Identifier: Apache-2.0
"""What a worker hears from the coordinator: the newest generation counts, urgent ones interrupt, farewells end it."""

from __future__ import annotations

import threading

import pytest

from unisono.core.errors import DataDisagrees
from unisono.elastic.station import NEVER_AGAIN, Alone, Departed, Manned, membership_of
from unisono.wire import messages as m


def form(generation: int, members: tuple[int, ...] = (0, 1), urgent: bool = True) -> m.Form:
    return m.Form(
        worker=1,
        generation=generation,
        members=list(members),
        ranges=[[i, i + 1] for i in range(len(members))],
        addresses=[f"unix:{number}" for number in members],
        urgent=urgent,
        because=f"reason {generation}",
    )


class Worker1:
    """A station, and what it has told and been interrupted by."""

    def __init__(self) -> None:
        self.told: list[m.Message] = []
        self.interrupted: list[int] = []
        self.station = Manned(1, self.told.append)
        self.station.call_on_news(self.interrupted.append)

    def hears(self, *messages: m.Message) -> Manned:
        for message in messages:
            self.station.hear(message)
        return self.station


def test_only_urgent_generations_interrupt() -> None:
    worker = Worker1()
    worker.hears(form(1), form(2, urgent=False), form(3))
    assert worker.interrupted == [1, 3]


def test_the_newest_generation_counts_whatever_the_order() -> None:
    worker = Worker1()
    station = worker.hears(form(3), form(2))
    assert station.next_form(0).generation == 3
    assert worker.interrupted == [3], "an older one interrupts nobody"


def test_the_same_generation_told_twice_is_no_news() -> None:
    worker = Worker1()
    station = worker.hears(form(2), form(2))
    assert station.has_news(1)
    assert not station.has_news(2)
    assert worker.interrupted == [2]


def test_a_generation_without_this_worker_is_a_farewell() -> None:
    station = Worker1().hears(form(2, members=(0, 2), urgent=False))
    assert station.has_news(1)
    with pytest.raises(Departed) as caught:
        station.next_form(1)
    assert caught.value.because == "reason 2"


def test_a_farewell_interrupts_everything_and_beats_every_generation() -> None:
    worker = Worker1()
    station = worker.hears(form(5), m.Depart(worker=1, because="the run went on without it"))
    assert worker.interrupted == [5, NEVER_AGAIN]
    assert station.has_news(99)
    with pytest.raises(Departed) as caught:
        station.next_form(1)
    assert caught.value.failure is None


def test_a_farewell_with_a_failure_says_what_did_not_fit() -> None:
    failure = DataDisagrees("other data", do="use the same")
    station = Worker1().hears(m.Depart(worker=1, because="other data", failure=failure.as_dict()))
    with pytest.raises(Departed) as caught:
        station.await_turn(0)
    assert isinstance(caught.value.failure, DataDisagrees)
    assert caught.value.failure.do == "use the same"


def test_a_departure_is_not_swallowed_by_a_script_that_catches_every_exception() -> None:
    assert not issubclass(Departed, Exception)


def test_whoever_waits_for_a_generation_wakes_when_it_comes() -> None:
    worker, found = Worker1(), []
    waiting = threading.Thread(target=lambda: found.append(worker.station.next_form(4).generation), daemon=True)
    waiting.start()
    worker.hears(form(4), form(5, urgent=False))
    waiting.join(10)
    assert found == [5]


def test_whoever_waits_for_its_turn_wakes_when_it_comes() -> None:
    worker = Worker1()
    waiting = threading.Thread(target=worker.station.await_turn, args=(2,), daemon=True)
    waiting.start()
    worker.hears(m.Proceed(worker=1, number=1), m.Proceed(worker=1, number=2))
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_turn_that_was_given_stays_given() -> None:
    station = Worker1().hears(m.Proceed(worker=1, number=0, said="blocks.1"))
    assert station.await_turn(0) == "blocks.1"
    assert station.await_turn(0) == "blocks.1"


def test_a_verdict_is_there_when_there_is_news_and_not_waited_for_for_ever() -> None:
    station = Manned(1, lambda _: None, verdict_s=0.01)
    station.hear(form(2))
    assert station.await_verdict(1)
    assert not station.await_verdict(2)


def test_a_request_to_stop_is_kept_and_interrupts_nothing() -> None:
    worker = Worker1()
    assert worker.station.stop_because == ""
    assert worker.hears(m.Stop(worker=1, because="enough")).stop_because == "enough"
    assert worker.interrupted == []
    assert not worker.station.has_news(0)


def test_what_is_told_goes_out_as_it_is() -> None:
    worker = Worker1()
    worker.station.tell(m.Finished(worker=1))
    assert worker.told == [m.Finished(worker=1)]


def test_a_script_by_itself_is_its_own_only_member() -> None:
    station = Alone(8)
    assert station.has_news(0)
    assert not station.has_news(1)
    found = membership_of(station.next_form(0), "nowhere")
    assert (found.generation, found.members, found.ranges) == (1, (0,), (range(8),))
    station.await_turn(3)


def test_a_membership_is_the_form_in_other_words() -> None:
    found = membership_of(form(7, members=(4, 1)), "point")
    assert found.generation == 7
    assert found.members == (4, 1)
    assert found.ranges == (range(1), range(1, 2))
    assert found.addresses == ("unix:4", "unix:1")
    assert found.meeting_point == "point"
