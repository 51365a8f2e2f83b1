# SPDX-License-Identifier: Apache-2.0
"""THE loop: the front page of Unisono. Every training, whatever its strategy, goes through `train`.

Read it top to bottom. It owns the order of things inside a step and nothing else: data comes from the loader, who
computes what from the session, gradients and updates from the strategy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, Literal

from torch import Tensor

from unisono.core import events, seeds
from unisono.core.errors import NonFiniteLoss, PeerLost
from unisono.data.step_data import StepData
from unisono.elastic.session import Attempt
from unisono.parallel.strategy import Microbatch, Reduced
from unisono.train.guard import ComputeAgain
from unisono.train.job import Job
from unisono.train.moving import to_device
from unisono.train.noise_told import observe_noise
from unisono.train.nonfinite import check_finite, line_of
from unisono.train.notes import STOPPED_BY_RUN, Notes
from unisono.train.options import EarlyStop, EpochInfo, StepInfo
from unisono.train.state import TrainState


def _nothing(*_: Any) -> None:
    return None


@dataclass
class Plan:
    """What the loop is asked to do around the steps. Functions, so that the loop needs no branches on features."""

    compute: Callable[[Any], Tensor]  # the loss of one batch
    evaluate: Callable[[], dict[str, float]] = dict
    after_step: Callable[[], None] = _nothing  # schedules that follow steps
    after_epoch: Callable[[dict[str, float]], None] = _nothing  # schedules that follow epochs
    on_step: Callable[[StepInfo], None] = _nothing
    on_epoch: Callable[[EpochInfo], None] = _nothing
    on_nonfinite: Literal["stop", "skip"] = "stop"
    early_stop: EarlyStop | None = None
    stop_asked: Callable[[], bool] = lambda: False


def train(job: Job, plan: Plan) -> None:
    """Run until the epochs or steps are done, or something says stop. `job.state` says where to begin."""
    state = job.state
    while not _finished(job, state):
        try:
            go_through_epoch(job, plan, state)
        except PeerLost as lost:  # nothing of the step in hand has happened
            before = state.step, state.epoch
            job.reform(lost)
            catch_up(job, plan, state, *before)
        except ComputeAgain:  # the state has been put back to where the workers last agreed
            continue


def go_through_epoch(job: Job, plan: Plan, state: TrainState) -> None:
    """The steps that are left of it, then its end; or up to where the membership changes."""
    job.session.activity.step = state.step
    job.session.activity.now(f"checking the data of epoch {state.epoch + 1}")
    job.check_data(state.epoch)
    for data in steps(job, state):
        if one_step(job, plan, state, data) and not _stop_now(job, state):
            job.reform(None)
            return
    _end_epoch(job, plan, state)


def one_step(job: Job, plan: Plan, state: TrainState, data: Loaded) -> bool:
    """One transaction. Returns whether all workers have agreed to re-form after it."""
    started = time.perf_counter()
    with job.session.step(state.step) as attempt:
        reduced = gradients(job, plan, attempt, data)
    notes = [Notes(*row) for row in reduced.notes]
    find_line = partial(_line_of, job, plan, attempt, data)
    if not check_finite(job, reduced, state.step, find_line, plan.on_nonfinite):
        state.advance(math.nan, sum(data.step.counts), skipped=True)
        _heed_stop(job, state, notes)
        job.save_if_wanted([row.riders for row in notes], is_last=_stop_now(job, state))
        return any(row.change for row in notes)
    # Noise that an optimizer or a callback draws must not depend on which microbatch came last here.
    seeds.apply(seeds.derive(job.spec.seed, "update", state.step))
    job.faults.reach("update")
    job.session.activity.now("updating the weights")
    job.checkpoints.await_copy()
    update_started = time.perf_counter()
    job.strategy.step(reduced.loss, partial(_loss_again, job, plan, attempt, data))
    job.update_s = time.perf_counter() - update_started  # told to the others with the next step's compute
    lr = current_lr(job)
    steps = job.strategy.steps_in(data.step.turns)
    for _ in range(steps):
        plan.after_step()
    state.advance(reduced.loss, sum(data.step.counts), steps=steps)
    _heed_stop(job, state, notes)
    noise = observe_noise(state, job.spec.batch_size, reduced, sum(data.step.counts))
    report_step(job, state, reduced, lr, time.perf_counter() - started + data.waited_s, noise)
    if state.step > job.told:
        job.told = state.step
        job.session.activity.now(f"in a callback after step {state.step}")
        plan.on_step(StepInfo(state.step, state.epoch + 1, reduced.loss, lr, state.samples, job.is_first))
    # Before the epoch's end is gone through: a run that is taken up again, or is given more steps, goes on inside it.
    job.save_if_wanted([row.riders for row in notes], is_last=_stop_now(job, state))
    return any(row.change for row in notes)


def _heed_stop(job: Job, state: TrainState, notes: Sequence[Notes]) -> None:
    """Whoever has asked for the end, it comes after this step, also when the step was skipped."""
    if asked := max(row.stop for row in notes):
        state.stopped_early = "the script asked to stop"
        if asked == STOPPED_BY_RUN:
            state.stopped_early = job.session.station.stop_because or "the run was asked to stop"
            state.stopped_by_run = True


def catch_up(job: Job, plan: Plan, state: TrainState, step: int, epoch: int) -> None:
    """This worker stood at `step` and `epoch`, and got what came after from others, who had finished it: its callbacks
    still hear of the step, and of the epoch's end."""
    for data in state.news:
        event = events.from_dict(data)
        if isinstance(event, events.StepFinished) and event.step > step:
            job.told = event.step
            plan.on_step(StepInfo(event.step, event.epoch, event.loss, event.lr, event.samples, job.is_first))
    if state.epoch > epoch:
        plan.on_epoch(EpochInfo(**state.last_epoch, is_first_worker=job.is_first))


@dataclass(frozen=True)
class Loaded:
    """A step's data with this worker's batches in memory, and how long that took."""

    step: StepData
    batches: Sequence[Any]  # all turns of a microbatch, then those of the next
    waited_s: float


def steps(job: Job, state: TrainState) -> Iterator[Loaded]:
    """The epoch's remaining steps, as long as the training is not finished."""
    left = job.steps_left
    last = None if left is None else state.step_in_epoch + left
    source = job.loader.epoch(state.epoch, state.step_in_epoch, job.session.mine, last)
    while not _stop_now(job, state):
        started = time.perf_counter()
        job.session.activity.step = state.step
        job.session.activity.now("reading data")
        job.faults.step = state.step + 1
        job.faults.reach("data")
        data = next(source, None)
        if data is None:
            return
        batches = [to_device(batch, job) for batch in data.batches]
        yield Loaded(data, batches, time.perf_counter() - started)


def gradients(job: Job, plan: Plan, attempt: Attempt, data: Loaded) -> Reduced:
    """One step's gradient over all microbatches and workers, left in the parameters; parameters stay as they are."""
    session = job.session
    weights = job.weights(data.step, data.batches)
    session.activity.now("computing")
    started = time.perf_counter()
    job.strategy.begin_step(weights)
    exchanged_s, asked = 0.0, time.perf_counter()
    for index, turn in job.strategy.work(attempt.mine, data.step.turns):
        exchanged_s += time.perf_counter() - asked  # nothing, unless updates go out and weights come in between
        session.check()
        if turn is not None:
            job.faults.go_on_to(attempt.step + turn + 1)
            job.faults.reach("data")
        job.faults.reach("forward")
        began = time.perf_counter()
        if turn is None:
            microbatch = Microbatch(attempt.step, index, weights[index], _shares(job, attempt, data, index))
            job.strategy.forward_backward(microbatch, *_computes(job, plan, attempt, data, index))
        else:
            batch = to_device(data.step.fetch(turn, index), job)  # nobody knew before who computes it
            microbatch = Microbatch(attempt.step + turn, index, job.weight_of(data.step, turn, index, batch))
            job.strategy.forward_backward(microbatch, partial(plan.compute, batch))
        job.faults.stretch(time.perf_counter() - began)
        asked = time.perf_counter()
    ended = time.perf_counter()
    exchanged_s += ended - asked
    session.activity.measured(ended - started + data.waited_s, len(attempt.mine))
    session.activity.now("adding up the gradients")
    steps = job.strategy.steps_in(data.step.turns)
    job.faults.go_on_to(attempt.step + steps)  # also for who computed nothing of the last of them, or nothing at all
    stop = STOPPED_BY_RUN if job.stop_is_asked(steps) else float(plan.stop_asked())
    notes = Notes(
        data.waited_s,
        ended - started - exchanged_s + job.update_s,
        exchanged_s,
        stop,
        data.step.check,
        session.wants_change,
        job.guard.due(attempt.step, job.comm.size),
        *job.checkpoints.riders(attempt.step + steps, job.is_first, steps),
    )
    reduced = job.strategy.reduce(list(map(float, notes)))
    job.check_stream(attempt.step + 1, [Notes(*row).check for row in reduced.notes])
    job.compare_replicas(attempt.step, [Notes(*row).checksum for row in reduced.notes])
    if reduced.silent:
        shown = ", ".join(reduced.silent[:5]) + (
            f" and {len(reduced.silent) - 5} more" if len(reduced.silent) > 5 else ""
        )
        job.notice_once(
            "silent-parameters",
            f"step {attempt.step + 1}: no gradient in some microbatches for {shown}; counted as zeros there",
        )
    return reduced


def _turns(attempt: Attempt, data: Loaded, index: int) -> Sequence[Any]:
    """The batches of one of this worker's microbatches: one, or several for strategies that make several updates."""
    first = (index - attempt.mine.start) * data.step.turns
    return data.batches[first : first + data.step.turns]


def _shares(job: Job, attempt: Attempt, data: Loaded, index: int) -> tuple[float, ...]:
    """How much of the microbatch each turn is, by true counts."""
    if data.step.turns == 1:
        return (1.0,)
    count = job.request.count
    counts = [float(row[index]) for row in data.step.by_turn]
    if count is not None:
        counts = [0.0 if batch is None else float(count(batch)) for batch in _turns(attempt, data, index)]
    total = math.fsum(counts)
    return tuple(one / total if total else 0.0 for one in counts)


def _computes(job: Job, plan: Plan, attempt: Attempt, data: Loaded, index: int) -> list[Callable[[], Tensor]]:
    batches = _turns(attempt, data, index)
    if len(batches) == 1:
        return [partial(plan.compute, batches[0])]

    def compute(turn: int, batch: Any) -> Tensor:
        job.session.check()
        job.session.activity.now(f"computing turn {turn + 1} of {len(batches)}")
        return plan.compute(batch)

    return [partial(compute, turn, batch) for turn, batch in enumerate(batches)]


def _loss_again(job: Job, plan: Plan, attempt: Attempt, data: Loaded) -> float:
    loss = gradients(job, plan, attempt, data).loss
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss is {loss} at a further evaluation of step {attempt.step + 1}",
            cause="the optimizer tried a step that is too long",
            do="lower its learning rate, or give it a line search",
        )
    return loss


def _line_of(job: Job, plan: Plan, attempt: Attempt, data: Loaded, index: int) -> str:
    microbatch = Microbatch(attempt.step, index, 1.0, _shares(job, attempt, data, index))
    return line_of(job, microbatch, _computes(job, plan, attempt, data, index))


def report_step(
    job: Job, state: TrainState, reduced: Reduced, lr: float, seconds: float, more: Sequence[events.Event] = ()
) -> None:
    # Whoever waited least was waited for: what is above that least is waiting, the least itself is communication.
    moving = min(reduced.blocked_s)
    timings = {
        str(job.worker_at(rank)): {
            "data": round(notes.waited_s, 6),
            "compute": round(notes.compute_s, 6),
            "communication": round(notes.exchanged_s + moving, 6),
            "waiting": round(blocked - moving, 6),
        }
        for rank, (notes, blocked) in enumerate(zip(starmap(Notes, reduced.notes), reduced.blocked_s, strict=True))
    }
    finished = partial(
        events.StepFinished,
        step=state.step,
        epoch=state.epoch + 1,
        loss=reduced.loss,
        samples=state.samples,
        lr=lr,
        seconds=round(seconds, 6),
        timings=timings,
        generation=job.session.generation,
        time_s=time.time(),
    )
    read_norm = job.update.norm_reading
    job.commit_later(lambda: (finished(grad_norm=read_norm()), *more))
    job.tell_reading()
    job.tell_speed()


def _end_epoch(job: Job, plan: Plan, state: TrainState) -> None:
    started = time.perf_counter()
    job.checkpoints.await_copy()
    job.session.activity.now(f"evaluating after epoch {state.epoch + 1}")
    job.faults.reach("evaluate")
    metrics = plan.evaluate()
    seeds.apply(seeds.derive(job.spec.seed, "epoch", state.epoch))
    if metrics:
        state.history.append({"step": state.step, "epoch": state.epoch + 1, **metrics})
        seconds = time.perf_counter() - started
        job.commit(events.Evaluated(step=state.step, epoch=state.epoch + 1, metrics=metrics, seconds=seconds))
    plan.after_epoch(metrics)
    state.last_epoch = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "train_loss": state.epoch_loss,
        "metrics": metrics,
    }
    plan.on_epoch(EpochInfo(**state.last_epoch, is_first_worker=job.is_first))
    if plan.early_stop and plan.early_stop.should_stop([entry[plan.early_stop.metric] for entry in state.history]):
        best = plan.early_stop
        state.stopped_early = f"{best.metric} has not improved for {best.patience} evaluations"
    state.next_epoch()


def _stop_now(job: Job, state: TrainState) -> bool:
    return bool(state.stopped_early) or (job.spec.max_steps is not None and state.step >= job.spec.max_steps)


def _finished(job: Job, state: TrainState) -> bool:
    stopped = _stop_now(job, state) and not state.step_in_epoch  # the epoch's end has been gone through
    return stopped or (job.spec.epochs is not None and state.epoch >= job.spec.epochs)


def current_lr(job: Job) -> float:
    return float(job.request.optimizer.param_groups[0]["lr"])
