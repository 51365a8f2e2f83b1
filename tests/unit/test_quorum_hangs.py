# SPDX-License-Identifier: Apache-2.0
"""Workers that hold the others up: looked at, named and put out; and those who are only busy, who are waited for."""

from __future__ import annotations

from pretend_run import Pretend

from unisono.core import events
from unisono.wire import messages as m


def stuck(run: Pretend, *culprits: int, doing: str = "computing") -> None:
    """The others wait for these."""
    for worker in run.members:
        if worker in culprits:
            run.doing(worker, doing, where="train.py:7, in forward: x = f(x)")
        else:
            run.doing(worker, "adding up the gradients", waits=True)


def test_a_worker_that_turns_out_to_be_stopped_is_not_taken_for_one_that_hangs() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(10.5)
    assert [look.worker for look in run.told(m.Examine)] == [1]
    run.hear(m.Examined(worker=1, stopped=True))
    assert run.recorded(events.Diagnosed) == []
    assert run.told(m.Kill) == []
    run.hear(m.Alive(frozen=[1]))
    assert run.removed() == [(1, "frozen")]


def test_a_worker_that_hangs_is_looked_at_named_and_put_out() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(9)
    assert run.told(m.Examine) == []
    run.later(1.5)
    assert [look.worker for look in run.told(m.Examine)] == [1]
    assert run.told(m.Kill) == []
    run.hear(m.Examined(worker=1, where="data.py:3, in read: f.read()", doing="reading data in a loader process"))
    (diagnosis,) = run.recorded(events.Diagnosed)
    assert diagnosis.who == 1
    assert "worker 1 on machine-a never reached: adding up the gradients (step 11)" in diagnosis.failure["what"]
    assert "reading data in a loader process" in diagnosis.failure["where"]
    assert "data.py:3" in diagnosis.failure["where"]
    assert diagnosis.failure["cause"] == "workers 0, 2 are waiting for it"
    (kill,) = run.told(m.Kill)
    assert (kill.worker, kill.place) == (1, "data.py:3, in read: f.read()")
    assert run.members == [0, 2], "also when it cannot be killed, because the kernel holds it"
    assert run.removed() == [(1, "hung")]


def test_the_death_of_a_worker_that_hung_is_not_reported_again_but_it_is_replaced() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(15)
    run.die(1, because="hung", place="train.py:7")
    assert run.removed() == [(1, "hung")]
    assert [spawn.replaces for spawn in run.told(m.Spawn)] == [1]


def test_one_that_cannot_be_looked_at_is_put_out_with_what_it_said_itself() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(11)
    run.later(4)
    (kill,) = run.told(m.Kill)
    assert kill.place == "train.py:7, in forward: x = f(x)"


def stands_still(run: Pretend, for_s: float) -> None:
    """A replica of several ranks, without another that could wait for it."""
    run.doing(0, "computing", for_s=for_s, still_s=for_s)


def test_a_replica_alone_whose_ranks_wait_for_each_other_is_named_and_ended() -> None:
    run = Pretend(least=1, most=1, hang_s=10.0).begin(1)
    run.later(20)
    stands_still(run, 9.0)
    run.later(0.5)
    assert run.told(m.Examine) == []
    stands_still(run, 10.5)
    run.later(0.5)
    assert [look.worker for look in run.told(m.Examine)] == [0]
    run.hear(m.Examined(worker=0, where="train.py:7, in read: x = f()", doing="waiting for its rank 1"))
    (end, *_) = run.told(m.End)
    assert end.failure is not None
    assert end.failure["what"] == "worker 0 on machine-a stands still: computing (step 11)"
    assert "train.py:7, in read: x = f()" in end.failure["where"]


def test_a_replica_whose_ranks_all_compute_is_left_alone_and_not_looked_at_all_the_time() -> None:
    run = Pretend(least=1, most=1, hang_s=10.0).begin(1)
    run.later(20)
    stands_still(run, 11.0)
    run.later(0.5)
    run.hear(m.Examined(worker=0, where="train.py:9", doing=""))
    stands_still(run, 15.0)
    run.later(4)
    assert len(run.told(m.Examine)) == 1
    assert run.told(m.Kill) == []
    stands_still(run, 22.0)
    run.later(7)
    assert len(run.told(m.Examine)) == 2


def test_one_that_moves_again_while_it_is_looked_at_is_left_alone() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(11)
    for worker in range(3):
        run.doing(worker, "computing", step=12)
    run.later(0.5)
    run.hear(m.Examined(worker=1, where="train.py:9"))
    run.later(5)
    assert run.told(m.Kill) == []
    assert run.members == [0, 1, 2]


def test_a_worker_whose_heartbeat_has_stopped_hangs_even_though_it_never_said_for_how_long() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(0.5)
    said = m.as_dict(m.Status(worker=1, generation=1, step=10, doing="computing", for_s=0.5))
    del run.statuses[1]
    for _ in range(30):  # its host tells its last word again and again
        run.hear(m.Alive(statuses=[said]), "a")
        run.later(0.5)
    assert [kill.worker for kill in run.told(m.Kill)] == [1]


def test_a_worker_that_said_it_is_busy_is_waited_for_and_the_user_is_told_once() -> None:
    run = Pretend(least=1, most=4, hang_s=10.0).begin(4)
    run.doing(0, "preparing data", busy=True)
    for worker in (1, 2, 3):
        run.doing(worker, "waiting for its turn", waits=True)
    run.later(9)
    assert run.notices() == []
    run.later(90)
    assert run.told(m.Kill) == []
    assert run.notices() == ["workers 1, 2, 3 wait for worker 0: preparing data, 10 s"]


def test_the_user_is_told_whom_all_wait_for_before_the_start_too() -> None:
    run = Pretend(least=3, most=3, hang_s=30.0)
    run.started(0, 1, 2)
    run.hello()
    run.ready(1)
    run.doing(0, "starting", generation=0, step=0, where="train.py:3, in load: open(path)")
    run.doing(1, "waiting for the others to start", waits=True, generation=0, step=0)
    run.doing(2, "preparing data", busy=True, generation=0, step=0)
    run.later(35)
    assert run.told(m.Kill) == []
    assert run.notices() == [
        "worker 1 waits for worker 2: preparing data, 10 s",
        "worker 1 waits for worker 0: starting, 30 s, in train.py:3, in load: open(path)",
    ]


def test_a_member_that_never_comes_to_an_urgent_generation_is_named_and_put_out() -> None:
    run = Pretend(least=1, most=4, hang_s=5.0).begin(4)
    run.doing(1, "computing")
    run.later(4)
    run.die(3)
    run.doing(0, "re-forming", waits=True)
    run.doing(2, "re-forming", waits=True)
    run.statuses[1] = m.Status(worker=1, generation=1, step=10, doing="computing"), run.now_s - 4
    run.later(14)
    assert run.told(m.Examine) == [], "re-forming has at least 15 s"
    run.later(2)
    run.hear(m.Examined(worker=1, where="train.py:7"))
    assert [kill.worker for kill in run.told(m.Kill)] == [1]
    assert run.members == [0, 2]


def test_a_joiner_that_waits_for_a_long_step_of_the_others_puts_nobody_out() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(2)
    for worker in (0, 1):
        run.doing(worker, "computing")
    run.hear(m.Started(worker=2), "a")
    run.later(6)
    run.ready(2)
    assert run.members == [0, 1, 2]
    run.doing(2, "waiting for the others to start", waits=True, step=0)
    run.later(120)
    assert run.told(m.Examine) == []


def test_a_joiner_that_hangs_while_the_generation_forms_is_put_out() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(2)
    run.hear(m.Started(worker=2), "a")
    run.later(6)
    run.ready(2)
    for worker in (0, 1):
        run.doing(worker, "giving the state to a joiner", waits=True)
    run.doing(2, "copying the state", step=0)
    run.later(30)
    assert [kill.worker for kill in run.told(m.Kill)] == [2]
    assert run.members == [0, 1]


def test_a_state_that_takes_long_to_copy_puts_nobody_out() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(2)
    run.hear(m.Started(worker=2), "a")
    run.later(6)
    run.ready(2)
    for worker in (0, 1):
        run.doing(worker, "giving the state to a joiner", waits=True)
    run.doing(2, "copying the state", waits=True, step=0)
    run.later(90)
    assert run.told(m.Kill) == []


def test_one_that_hangs_before_it_has_left_is_put_out_too() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 2)
    run.leave(2)
    assert run.members == [0, 1]
    for worker in (0, 1, 2):
        status, since_s = run.statuses[worker]
        assert status.generation == 1, "none of them has come to the boundary yet"
        run.statuses[worker] = status, since_s
    run.orders.clear()
    run.later(20)
    assert [kill.worker for kill in run.told(m.Kill)] == [2]
    assert run.forms()[0].urgent
    assert run.members == [0, 1]


def test_too_few_workers_are_no_hang() -> None:
    run = Pretend(least=3, most=3, hang_s=10.0).begin(3)
    run.die(2)
    run.obey_spawns()
    run.doing(0, "re-forming", waits=True)
    run.doing(1, "computing")
    run.later(60)
    assert run.told(m.Kill) == []


def test_an_order_to_kill_is_given_again_when_the_host_comes_back() -> None:
    run = Pretend(least=1, most=3, hang_s=10.0).begin(3)
    stuck(run, 1)
    run.later(15)
    run.orders.clear()
    run.hello()
    assert [kill.worker for kill in run.told(m.Kill)] == [1]


def test_a_slow_start_is_not_taken_for_a_hang_once_the_generation_is_published() -> None:
    run = Pretend(least=3, most=3, hang_s=2.0)
    run.started(0, 1, 2)
    run.hello()
    run.ready(1, 2)
    run.doing(0, "starting", generation=0, step=0)
    for waiting in (1, 2):
        run.doing(waiting, "waiting for the others to start", waits=True, generation=0, step=0)
    run.later(20)
    run.ready(0)
    assert run.generation == 1
    run.later(1)  # heartbeats still say what was done before
    assert run.told(m.Examine) == []
