# SPDX-License-Identifier: Apache-2.0
"""Who holds the run up, by what the workers say: tables of heartbeats, and the sentence for the culprit."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.elastic.hangs import explain, stopped, suspect
from unisono.wire.messages import Status

LIMIT_S = 30.0


def says(worker: int, doing: str, for_s: float = 40.0, waits: bool = False, **more: Any) -> Status:
    return Status(worker=worker, doing=doing, for_s=for_s, waits=waits, **({"generation": 3, "step": 9} | more))


def waits(worker: int, for_s: float = 40.0, doing: str = "adding up the gradients", **more: Any) -> Status:
    return says(worker, doing, for_s, waits=True, **more)


FORMING = "re-forming"
GIVING, COPYING = "giving the state to a joiner", "copying the state"


@pytest.mark.parametrize(
    ("statuses", "culprits"),
    [
        pytest.param([waits(0), says(1, "computing"), waits(2)], (1,), id="one has not come"),
        pytest.param([waits(0), says(1, "computing"), says(2, "reading data")], (1, 2), id="two have not come"),
        pytest.param([waits(0), says(1, "computing", for_s=5.0)], (), id="it is on the move"),
        pytest.param([waits(0), says(1, "a"), says(2, "b", for_s=5.0)], (), id="one of two is on the move"),
        pytest.param([waits(0, for_s=20.0), says(1, "computing")], (), id="the wait is not long yet"),
        pytest.param([waits(0), waits(2, for_s=1.0), says(1, "computing")], (), id="one has only just come"),
        pytest.param([says(0, "computing"), says(1, "computing")], (), id="nobody waits"),
        pytest.param([waits(0), says(1, "preparing data", busy=True)], (), id="it said that it is busy"),
        pytest.param([waits(0), says(1, "x", busy=True), says(2, "y")], (), id="one of two said that it is busy"),
        pytest.param([waits(0), waits(1), waits(2)], (), id="all wait at the same place"),
        pytest.param([waits(0), waits(1), waits(2, doing="evaluating")], (2,), id="one waits elsewhere"),
        pytest.param([waits(0), waits(1), waits(2, step=10)], (2,), id="one is a step ahead"),
        pytest.param([waits(0), waits(1, step=10)], (1,), id="of two, the one behind is right"),
        pytest.param([waits(0, doing="evaluating"), waits(1), waits(2)], (0,), id="the many are right"),
        pytest.param([waits(0, waits_for=[2]), waits(1, waits_for=[2]), waits(2, waits_for=[0, 1])], (2,), id="silent"),
        pytest.param([waits(0, waits_for=[1]), waits(1, waits_for=[0])], (1,), id="silent, of two the last"),
        pytest.param(
            [
                waits(0, waits_for=[3], unheard=[3]),
                waits(1, waits_for=[0], unheard=[3]),
                waits(3, waits_for=[0], unheard=[0, 1]),
            ],
            (3,),
            id="most miss one who waits for the silent one",
        ),
        pytest.param([waits(0, waits_for=[7]), waits(1)], (), id="somebody waits for a stranger"),
        pytest.param([waits(0)], (), id="alone"),
        pytest.param([says(0, "computing", still_s=31.0)], (0,), id="a replica alone whose first rank stands still"),
        pytest.param([says(0, "computing", still_s=29.0)], (), id="it has not stood still for long"),
        pytest.param([says(0, "saving", still_s=50.0, busy=True)], (), id="it stands still and said that it is busy"),
        pytest.param([says(0, "a", still_s=50.0), says(1, "a", still_s=1.0)], (), id="another replica goes on"),
        pytest.param([says(0, "a", still_s=50.0), waits(1)], (0,), id="another replica waits: as ever"),
        pytest.param([], (), id="nobody"),
    ],
)
def test_the_culprit_of_a_stalled_step(statuses: list[Status], culprits: tuple[int, ...]) -> None:
    found = suspect(statuses, LIMIT_S)
    assert (found.culprits if found else ()) == culprits
    if found is not None:
        assert set(found.waiting) == {status.worker for status in statuses if status.waits} - set(culprits)
        assert found.seconds >= LIMIT_S


@pytest.mark.parametrize(
    ("statuses", "joiners", "culprits"),
    [
        pytest.param([waits(0, doing=FORMING), says(1, "computing", generation=2)], (), (1,), id="one never came"),
        pytest.param(
            [waits(0, doing=FORMING), says(1, "computing", generation=2), waits(2, generation=2)],
            (),
            (1,),
            id="of those who did not come, the one that waits is no culprit",
        ),
        pytest.param([waits(0, doing=FORMING), waits(1, generation=2)], (), (1,), id="it waits in the old generation"),
        pytest.param([waits(0, doing=FORMING), says(1, COPYING)], (), (1,), id="one hangs while it copies"),
        pytest.param([waits(0, doing=GIVING), waits(1, doing=COPYING)], (1,), (), id="a large state takes its time"),
        pytest.param(
            [waits(0, doing=GIVING, waits_for=[1]), waits(1, doing=COPYING, waits_for=[0])],
            (1,),
            (),
            id="a large state takes its time, also where it is known who waits for whom",
        ),
        pytest.param(
            [waits(0, waits_for=[3], unheard=[3]), waits(1, waits_for=[3], unheard=[3]),
             waits(3, doing=GIVING, waits_for=[0], unheard=[0, 1, 4]),
             waits(4, doing=COPYING, waits_for=[3], unheard=[3])],
            (4,),
            (3,),
            id="of one who gives the state nothing is heard any more, others are through",
        ),
        pytest.param(
            [waits(0, doing=GIVING, waits_for=[1], unheard=[1]), waits(1, doing=COPYING, waits_for=[0], unheard=[0])],
            (1,),
            (1,),
            id="of two who do not hear each other, the one that holds the state stays",
        ),
        pytest.param(
            [waits(0, doing=FORMING), waits(1, doing=FORMING), waits(2, doing="waiting for the others to start")],
            (2,),
            (2,),
            id="all have come and nobody gets on: the joiner cannot be reached",
        ),
        pytest.param(
            [waits(0, doing=FORMING), waits(2, doing="waiting for the others to start", step=0)],
            (2,),
            (2,),
            id="never the one that holds the state",
        ),
        pytest.param(
            [waits(0, doing=FORMING), waits(1, doing=FORMING)], (), (), id="all have come and nobody is known to lack"
        ),
        pytest.param(
            [waits(0), waits(1, doing=FORMING), waits(2, doing=FORMING)], (), (2,), id="one is through, the others not"
        ),
        pytest.param(
            [waits(0, doing=FORMING, waits_for=[1]), waits(1, doing=FORMING, waits_for=[0, 2]),
             waits(2, doing=FORMING, waits_for=[1])],
            (),
            (1,),
            id="the one whom all miss",
        ),
    ],
)  # fmt: skip
def test_the_culprit_of_a_generation_that_never_forms(
    statuses: list[Status], joiners: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    found = suspect(statuses, LIMIT_S, joiners)
    assert (found.culprits if found else ()) == culprits


@pytest.mark.parametrize(("for_s", "found"), [(14.0, False), (16.0, True)])
def test_re_forming_is_given_fifteen_seconds_however_short_the_limit(for_s: float, found: bool) -> None:
    statuses = [waits(0, for_s, FORMING), says(1, "computing", generation=2)]
    assert (suspect(statuses, 2.0) is not None) is found


def test_the_sentence_names_worker_host_operation_line_and_what_to_do() -> None:
    statuses = [waits(0), says(1, "reading data", where="data.py:73, in read"), waits(3)]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    error = explain(found, statuses[1], "host-b", "", "", LIMIT_S)
    assert error.what == "worker 1 on host-b never reached: adding up the gradients (step 10)"
    assert error.where == "it is reading data, for 40 s, in data.py:73, in read"
    assert error.cause == "workers 0, 3 are waiting for it"
    assert "--hang-after (now 30 s)" in error.do


def test_the_rank_that_keeps_its_replica_waiting_is_in_the_sentence_where_no_other_worker_waits() -> None:
    status = says(0, "computing", still_s=31.0)
    found = suspect([status], LIMIT_S)
    assert found is not None
    error = explain(found, status, "a", "train.py:7, in read: x = f()", "waiting for its rank 1", LIMIT_S)
    assert error.what == "worker 0 on a stands still: computing (step 10)"
    assert error.where == "it is waiting for its rank 1, for 31 s, in train.py:7, in read: x = f()"
    assert "the ranks of a replica wait for each other" in error.cause


def test_a_connection_that_is_silent_because_of_a_rank_does_not_send_the_reader_to_the_network() -> None:
    first, second = waits(0, waits_for=[1]), waits(1)
    found = suspect([first, second], LIMIT_S)
    assert found is not None
    assert found.silent
    error = explain(found, second, "a", "train.py:7, in read: x = f()", "waiting for its rank 1", LIMIT_S)
    assert "network" not in error.do
    assert "waiting for its rank 1" in error.where


def test_what_was_seen_from_outside_beats_what_it_said_itself() -> None:
    statuses = [waits(0), says(1, "reading data", where="data.py:73")]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    error = explain(found, statuses[1], "b", "loader.py:5", "reading data in a loader process", LIMIT_S)
    assert error.where == "it is reading data in a loader process, for 40 s, in loader.py:5"
    assert error.cause == "worker 0 is waiting for it"


def test_a_worker_that_waits_elsewhere_is_told_apart_from_one_that_computes() -> None:
    statuses = [waits(0), waits(1), waits(2, doing="evaluating")]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    assert explain(found, statuses[2], "b", "", "", LIMIT_S).where.startswith("it waits in another place: evaluating")


def test_a_silent_connection_sends_the_reader_to_the_network() -> None:
    statuses = [waits(0, waits_for=[1]), waits(1, waits_for=[0])]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    assert found.silent
    error = explain(found, statuses[1], "host-b", "", "", LIMIT_S)
    assert error.what.startswith("nothing comes from worker 1 on host-b")
    assert "network of host-b" in error.do


def test_a_stopped_process_is_named_with_the_line_it_was_last_seen_in() -> None:
    error = stopped(says(1, "computing", where="train.py:3"), 1, "host-b")
    assert "worker 1 on host-b" in error.what
    assert "(step 10)" in error.what
    assert "train.py:3" in error.where
    assert stopped(None, 4, "host-b").where == ""


@pytest.mark.parametrize(
    ("votes", "culprit"),
    [
        pytest.param({0: 2, 1: 2, 2: 0, 3: 2}, 2, id="the one that most do not fit to"),
        pytest.param({0: 2, 2: 1}, 2, id="not all have noticed; of equals the last"),
        pytest.param({3: 1}, 1, id="one has noticed"),
    ],
)
def test_at_the_same_place_with_another_model_the_one_that_does_not_fit_is_named(
    votes: dict[int, int], culprit: int
) -> None:
    statuses = [waits(worker, out_of_step_with=votes.get(worker), waits_for=[1]) for worker in range(4)]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    assert found.culprits == (culprit,)
    error = explain(found, statuses[culprit], "box", "train.py:7, in <module>: fit()", "", LIMIT_S)
    assert error.what == f"worker {culprit} on box does not fit the others: adding up the gradients (step 10)"
    assert error.where == "it is in train.py:7, in <module>: fit()"
    assert "a layer frozen" in error.cause


def test_the_step_that_the_others_wait_in_is_named_and_not_the_last_that_the_culprit_knew_of() -> None:
    statuses = [waits(0, step=9), says(1, "in a callback after step 8", step=7), waits(2, step=9)]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    error = explain(found, statuses[1], "box", "", "", LIMIT_S)
    assert error.what == "worker 1 on box never reached: adding up the gradients (step 10)"
    assert error.where.startswith("it is in a callback after step 8, for 40 s")


def test_what_was_seen_from_outside_beats_a_heartbeat_that_is_out_of_date() -> None:
    statuses = [waits(0), waits(1, doing="checking the data of epoch 2")]
    found = suspect(statuses, LIMIT_S)
    assert found is not None
    guilty = statuses[found.culprits[0]]
    error = explain(found, guilty, "box", "data.py:3, in read", "reading data in a loader process", LIMIT_S)
    assert error.where == "it is reading data in a loader process, for 40 s, in data.py:3, in read"
