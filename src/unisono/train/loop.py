# SPDX-License-Identifier: Apache-2.0
"""THE loop: the front page of Unisono. Every training, whatever its strategy, goes through `train`.

Read it top to bottom. It owns the order of things inside a step and nothing else: data comes from the loader, who
computes what from the session, gradients and updates from the strategy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from unisono.core import events, seeds
from unisono.core.errors import NonFiniteLoss
from unisono.data.loading import StepData
from unisono.elastic.session import Attempt
from unisono.parallel.strategy import Microbatch, Reduced
from unisono.train.job import Job
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
    stopped_early: str = field(default="")


def train(job: Job, plan: Plan, state: TrainState) -> None:
    """Run until the epochs or steps are done, or something says stop. `state` says where to begin."""
    while not _finished(job, plan, state):
        job.check_data(state.epoch)
        for data in steps(job, plan, state):
            started = time.perf_counter()
            with job.session.step(state.step) as attempt:
                reduced = gradients(job, plan, attempt, data)
            if not check_finite(job, plan, reduced, state.step):
                state.advance(math.nan, sum(data.step.counts), skipped=True)
                continue
            # Noise that an optimizer or a callback draws must not depend on which microbatch came last here.
            seeds.apply(seeds.derive(job.spec.seed, "update", state.step))
            update_started = time.perf_counter()
            job.strategy.step(reduced.loss, partial(_loss_again, job, plan, attempt, data))
            job.update_s = time.perf_counter() - update_started  # told to the others with the next step's compute
            lr = current_lr(job)
            plan.after_step()
            state.advance(reduced.loss, sum(data.step.counts))
            report_step(job, plan, state, reduced, lr, time.perf_counter() - started + data.waited_s)
        _end_epoch(job, plan, state)


@dataclass(frozen=True)
class Loaded:
    """A step's data with this worker's batches in memory, and how long that took."""

    step: StepData
    batches: Sequence[Any]
    waited_s: float


def steps(job: Job, plan: Plan, state: TrainState) -> Iterator[Loaded]:
    """The epoch's remaining steps, as long as the training is not finished."""
    source = job.loader.epoch(state.epoch, state.step_in_epoch, job.session.mine)
    while not _stop_now(job, plan, state):
        started = time.perf_counter()
        data = next(source, None)
        if data is None:
            return
        batches = [to_device(batch, job) for batch in data.batches]
        yield Loaded(data, batches, time.perf_counter() - started)


def gradients(job: Job, plan: Plan, attempt: Attempt, data: Loaded) -> Reduced:
    """One step's gradient over all microbatches and workers, left in the parameters; parameters stay as they are."""
    started = time.perf_counter()
    weights = job.weights(data.step, data.batches)
    job.strategy.begin_step(weights)
    for index, batch in zip(attempt.mine, data.batches, strict=True):
        job.strategy.forward_backward(Microbatch(attempt.step, index, weights[index]), partial(plan.compute, batch))
    compute_s = time.perf_counter() - started + job.update_s
    reduced = job.strategy.reduce([data.waited_s, compute_s, float(plan.stop_asked()), float(data.step.check)])
    job.check_stream(attempt.step + 1, [notes[3] for notes in reduced.notes])
    if any(notes[2] for notes in reduced.notes):
        plan.stopped_early = "the script asked to stop"
    if reduced.silent:
        shown = ", ".join(reduced.silent[:5]) + (
            f" and {len(reduced.silent) - 5} more" if len(reduced.silent) > 5 else ""
        )
        job.notice_once(
            "silent-parameters",
            f"step {attempt.step + 1}: no gradient in some microbatches for {shown}; counted as zeros there",
        )
    return reduced


def _loss_again(job: Job, plan: Plan, attempt: Attempt, data: Loaded) -> float:
    loss = gradients(job, plan, attempt, data).loss
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss is {loss} at a further evaluation of step {attempt.step + 1}",
            cause="the optimizer tried a step that is too long",
            do="lower its learning rate, or give it a line search",
        )
    return loss


def check_finite(job: Job, plan: Plan, reduced: Reduced, step: int) -> bool:
    """Whether the step may be taken; raises where a loss that is not finite should end the run."""
    bad = [i for i, loss in enumerate(reduced.losses) if reduced.weights[i] and not math.isfinite(loss)]
    if not bad:
        return True
    assert job.session.membership is not None
    owner = job.session.membership.owner_of(bad[0])
    what = f"the loss is {reduced.losses[bad[0]]} at step {step + 1}, microbatch {bad[0]}, on worker {owner}"
    if plan.on_nonfinite == "stop":
        raise NonFiniteLoss(
            what,
            cause="often a learning rate that is too high, a division by zero in the loss, or a bad sample",
            do='lower the learning rate, clip gradients, look at that batch; or go on with on_nonfinite="skip"',
        )
    job.emit(events.StepSkipped(step=step + 1, because=what))
    return False


def report_step(job: Job, plan: Plan, state: TrainState, reduced: Reduced, lr: float, seconds: float) -> None:
    # Whoever waited least was waited for: what is above that least is waiting, the least itself is communication.
    moving = min(reduced.blocked_s)
    timings = {
        str(rank): {
            "data": round(notes[0], 6),
            "compute": round(notes[1], 6),
            "communication": round(moving, 6),
            "waiting": round(blocked - moving, 6),
        }
        for rank, (notes, blocked) in enumerate(zip(reduced.notes, reduced.blocked_s, strict=True))
    }
    job.emit(
        events.StepFinished(
            step=state.step,
            epoch=state.epoch + 1,
            loss=reduced.loss,
            samples=state.samples,
            lr=lr,
            seconds=round(seconds, 6),
            timings=timings,
            grad_norm=job.update.grad_norm,
        )
    )
    plan.on_step(StepInfo(state.step, state.epoch + 1, reduced.loss, lr, state.samples, job.is_first))


def _end_epoch(job: Job, plan: Plan, state: TrainState) -> None:
    started = time.perf_counter()
    metrics = plan.evaluate()
    seeds.apply(seeds.derive(job.spec.seed, "epoch", state.epoch))
    if metrics:
        state.history.append({"step": state.step, "epoch": state.epoch + 1, **metrics})
        seconds = time.perf_counter() - started
        job.emit(events.Evaluated(step=state.step, epoch=state.epoch + 1, metrics=metrics, seconds=seconds))
    plan.after_epoch(metrics)
    plan.on_epoch(EpochInfo(state.epoch + 1, state.step, state.epoch_loss, metrics, job.is_first))
    if plan.early_stop and plan.early_stop.should_stop([entry[plan.early_stop.metric] for entry in state.history]):
        best = plan.early_stop
        plan.stopped_early = f"{best.metric} has not improved for {best.patience} evaluations"
    state.next_epoch()


def _stop_now(job: Job, plan: Plan, state: TrainState) -> bool:
    return bool(plan.stopped_early) or (job.spec.max_steps is not None and state.step >= job.spec.max_steps)


def _finished(job: Job, plan: Plan, state: TrainState) -> bool:
    return _stop_now(job, plan, state) or (job.spec.epochs is not None and state.epoch >= job.spec.epochs)


def current_lr(job: Job) -> float:
    return float(job.request.optimizer.param_groups[0]["lr"])


def to_device(batch: Any, job: Job) -> Any:
    if job.device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(job.device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, job) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, job) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
