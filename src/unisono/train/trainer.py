# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: the public way to train. It turns its arguments into a job and a plan and hands them to the loop.

The same script runs by itself (``python train.py``) or as one of many workers (``unisono run train.py --workers 4``);
nothing in it says which.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.core import process
from unisono.core.errors import ModelMismatch, SetupError, UnisonoError, suggest
from unisono.data.loading import Data
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.grouped import Grouped, call
from unisono.parallel.local import LocalSteps
from unisono.train import context as contexts
from unisono.train.computing import Computing
from unisono.train.evaluation import Evaluation, Metric, measure_with
from unisono.train.finish import finish
from unisono.train.job import Job, Request, has_weights
from unisono.train.looking_ahead import settings_ahead
from unisono.train.loop import Plan, train
from unisono.train.moving import to_device
from unisono.train.opening import open_job
from unisono.train.options import Callback, Clip, EarlyStop, EpochInfo, Parallel, Result, StepInfo
from unisono.train.preparing import Prepared
from unisono.train.settling import explained, is_unordered
from unisono.train.stages_told import tell_stages

Loss = Callable[[Any, Any], Tensor]
Objective = Callable[[nn.Module, Any], Tensor]


class Trainer:
    """Train `model` on `data`, with the same result, bit for bit, on any number of workers.

    Args:
        model: any `nn.Module`.
        optimizer: any torch optimizer over the model's parameters.
        loss: called as ``loss(model(inputs), targets)`` for batches ``(inputs, targets)``; a mean over the samples.
        objective: instead of `loss`, called as ``objective(model, batch)``, for any other kind of batch.
        data, eval_data: a dataset, or `Data(dataset, ...)` to say how it is read.
        batch_size: samples of one optimizer step, over all workers.
        epochs, max_steps: when to end; whichever comes first.
        schedule: a torch learning-rate scheduler, stepped every step, or every epoch with ``schedule_every="epoch"``.
        clip: `Clip(norm=...)`, `Clip(value=...)`.   l1: weight of an L1 penalty on all trained parameters.
        metrics: name to ``f(outputs, targets)``, evaluated on `eval_data` after every epoch.
        early_stop: `EarlyStop(metric=..., patience=...)`.
        batch_norm: "local" (statistics of a microbatch) or "synchronised" (of the whole batch).
        on_nonfinite: "stop" or "skip" a step whose loss is NaN or infinite.
        count: for losses that are means over tokens: ``count(batch)`` says how many a batch has.
        microbatches: M, how many parts a step is cut into; ``--microbatches`` has the last word.
        state: name to an object with `state_dict` and `load_state_dict`: saved with checkpoints, given to joiners.
        exact: False gives up the promise for the backend's own all-reduce.
        local: `LocalSteps(h=...)`: replicas that update on their own and meet once a round; a step is then a round.
        precision, compile, recompute: how the model is computed, see `Computing`; ``--precision`` etc. come first.
        parallel: `Parallel(...)`: how the ranks of a replica share the model, where ``--mesh`` gives it several.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        data: Any,
        batch_size: int,
        loss: Loss | None = None,
        objective: Objective | None = None,
        eval_data: Any = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        schedule: Any = None,
        schedule_every: Literal["step", "epoch"] = "step",
        clip: Clip | None = None,
        l1: float = 0.0,
        metrics: Mapping[str, Metric] | None = None,
        early_stop: EarlyStop | None = None,
        callbacks: Sequence[Callback] = (),
        batch_norm: Literal["local", "synchronised"] = "local",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        count: Callable[[Any], float] | None = None,
        microbatches: int | None = None,
        exact: bool = True,
        state: Mapping[str, Any] | None = None,
        local: LocalSteps | None = None,
        precision: Literal["fp32", "bf16", "bf16-all", "fp16", "fp8"] = "fp32",
        compile: Literal["none", "blocks", "whole", "tuned"] = "none",
        recompute: Literal["none", "selective", "full", "auto"] = "none",
        parallel: Parallel | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss, self.objective = loss, objective
        self.eval_data, self.metrics = eval_data, dict(metrics or {})
        self.schedule, self.schedule_every = schedule, schedule_every
        self.callbacks, self.early_stop, self.on_nonfinite = tuple(callbacks), early_stop, on_nonfinite
        self._stop_asked = False
        self._job: Job | None = None
        self._fits = 0  # batches that went through the model
        self._check_options(batch_norm)
        self._request = Request(
            model, optimizer, as_data(data), batch_size, epochs, max_steps, microbatches, exact, clip, l1, batch_norm,
            schedule, count,
            travellers=_that_travel({"schedule": schedule} | _numbered(self.callbacks)) | _own(state or {}),
            computing=Computing(precision, compile, recompute), local=local, parallel=parallel or Parallel(), loss=loss,
        )  # fmt: skip

    def _check_options(self, batch_norm: str) -> None:
        """Options that cannot take effect are errors, before anything runs."""
        if (self.loss is None) == (self.objective is None):
            raise SetupError("give either loss or objective", do="loss=nn.functional.cross_entropy is the usual one")
        if getattr(self.loss, "reduction", "mean") == "sum":
            raise SetupError(
                "the loss adds up over the batch (reduction='sum')",
                cause="Unisono weights each microbatch's mean by its true count",
                do="use reduction='mean'",
            )
        choices = (
            ("schedule_every", self.schedule_every, ("step", "epoch")),
            ("on_nonfinite", self.on_nonfinite, ("stop", "skip")),
            ("batch_norm", batch_norm, ("local", "synchronised")),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                hint = suggest(str(value), allowed)
                raise SetupError(f"{name}={value!r} is not one of {', '.join(allowed)}" + (f"; {hint}" if hint else ""))
        taken = {"loss", "step", "epoch"} & set(self.metrics)
        if taken:
            raise SetupError(f"metrics may not be called {', '.join(sorted(taken))}: those names are taken")
        if self.metrics and (self.eval_data is None or self.objective is not None):
            raise SetupError("metrics need eval_data and a loss of (outputs, targets)")
        known = ("loss", *self.metrics)
        if self.early_stop and (self.eval_data is None or self.early_stop.metric not in known):
            raise SetupError(
                f"early_stop watches {self.early_stop.metric!r}, which no evaluation gives; known: {known}"
            )
        if self.schedule is None and self.schedule_every == "epoch":
            raise SetupError('schedule_every="epoch" cannot take effect without a schedule')
        if self.schedule is not None and getattr(self.schedule, "optimizer", self.optimizer) is not self.optimizer:
            raise SetupError("the schedule belongs to another optimizer than the one given")
        if self.on_nonfinite == "skip" and isinstance(self.optimizer, torch.optim.LBFGS):
            raise SetupError('on_nonfinite="skip" cannot take effect with LBFGS, which moves while it evaluates')
        plateau = isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and (self.schedule_every == "step" or self.eval_data is None):
            raise SetupError("ReduceLROnPlateau follows evaluations", do='set schedule_every="epoch" and eval_data')

    def stop(self) -> None:
        """End the training. May be called on any worker: the next step carries it to all, and is the last."""
        self._stop_asked = True

    def save(self) -> None:
        """Save a checkpoint. May be called on any worker: the next step carries it to all, and is what is saved."""
        if self._job is None:
            raise SetupError("save() was called while nothing is being trained", do="call it in a callback, during fit")
        self._job.checkpoints.asked = True

    def fit(self) -> Result:
        """Train to the end and return the result. Raises `UnisonoError` for what Unisono can explain."""
        context = contexts.current()
        context.begin_training()
        started = time.perf_counter()
        try:
            job = self._job = open_job(context, self._request)
            try:
                # A worker that joins holds the others' state: its callbacks begin as theirs did, without undoing it.
                copied = copy.deepcopy(job.state_out()) if job.position else None
                computing = job.model or self.model
                computing.train()
                self._compute = self._computation(job.prepared)
                plan = self._plan(job)
                for callback in self.callbacks:
                    callback.on_start(self)
                if copied is not None:
                    job.state_in(copied)
                if isinstance(job.strategy, Asynchronous):
                    job.strategy.skips = self.on_nonfinite == "skip"
                    follows = self.schedule if self.schedule_every == "step" else None
                    job.strategy.settings_ahead = partial(settings_ahead, follows, self.optimizer)
                with explained(job.request.model, self.optimizer, job.device, job.foresight):
                    train(job, plan)
                result = finish(job, time.perf_counter() - started)
            finally:
                job.close()
                self._job = None
            for callback in self.callbacks:
                callback.on_end(result)
        finally:
            context.close()
        return result

    def _plan(self, job: Job) -> Plan:
        return Plan(
            compute=self._loss_of,
            evaluate=self._evaluation(job),
            after_step=self._step_schedule if self.schedule_every == "step" else lambda: None,
            after_epoch=self._epoch_schedule if self.schedule_every == "epoch" else lambda _: None,
            on_step=self._on_step,
            on_epoch=self._on_epoch,
            on_nonfinite=self.on_nonfinite,
            early_stop=self.early_stop,
            stop_asked=lambda: self._stop_asked,
        )

    def _on_step(self, info: StepInfo) -> None:
        assert self._job is not None
        tell_stages(self._job, info.step)
        for callback in self.callbacks:
            callback.on_step(info)

    def _on_epoch(self, info: EpochInfo) -> None:
        for callback in self.callbacks:
            callback.on_epoch(info)

    def _loss_of(self, batch: Any) -> Tensor:
        try:
            value = self._call(batch)
            if not self._fits and self._job is not None:
                self._job.meter.learn(self.model, batch)
            self._fits += 1
            return value
        except UnisonoError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if "more than 1 value per channel" in str(error):
                raise _too_small_for_batch_norm(batch) from error
            if self._fits or isinstance(error, torch.OutOfMemoryError) or is_unordered(error):
                raise
            raise _does_not_fit(error, batch) from error

    def _call(self, batch: Any) -> Tensor:
        assert self._job is not None
        batch = self._job.take(batch)
        if self._job.pipeline is not None:
            assert isinstance(self._job.strategy, Grouped)
            return self._job.strategy.through_stages(*split_batch(batch))
        prepared = self._job.prepared
        arguments = (self.model, batch) if self.objective is not None else split_batch(batch)
        with prepared.context():
            value = self._reading(self._job)(self._compute, *arguments)
        if not self._fits and (breaks := prepared.graph_breaks()):
            self._job.notice_once("graph-breaks", breaks)
        if not isinstance(value, Tensor):
            raise SetupError(f"the loss is a {type(value).__name__}, not a tensor")
        return value if value.ndim == 0 else value.mean()

    def _reading(self, job: Job) -> Callable[..., Any]:
        """Calls what may read weights of the model by itself."""
        return job.within if self.objective is not None or has_weights(self.loss) else call

    def _computation(self, prepared: Prepared) -> Callable[..., Any]:
        """From a batch to its loss: of the model and the batch, or of inputs and targets."""
        if self.objective is not None:
            return prepared.whole(self.objective)
        assert self.loss is not None
        model, loss = self.model, prepared.loss(self.loss)
        return prepared.whole(lambda inputs, targets: loss(model(inputs), targets))

    def _evaluation(self, job: Job) -> Callable[[], dict[str, float]]:
        if self.eval_data is None:
            return dict
        measure = measure_with(self.loss, self.metrics) if self.loss else None
        count, reading = self._request.count, self._reading(job)

        def measure_batch(batch: Any, samples: int) -> list[tuple[float, float]]:
            batch = to_device(batch, job)
            weight = float(count(batch)) if count else float(samples)
            with job.prepared.context():
                if measure is None:
                    assert self.objective is not None
                    value = reading(self.objective, self.model, batch)
                    return [(float(value.double().mean()) * weight, weight)]
                inputs, targets = split_batch(batch)
                outputs = job.pipeline.evaluate(inputs) if job.pipeline else self.model(inputs)
                measured: list[tuple[float, float]] = reading(measure, job.whole(outputs), targets, weight)
                return measured

        data = dataclasses.replace(as_data(self.eval_data), shuffle=False)
        chunk = -(-job.spec.batch_size // job.spec.microbatches)
        evaluation = Evaluation(data, ("loss", *self.metrics), measure_batch, chunk, job.spec.seed, job.tell_taken)
        return lambda: evaluation.run(job.model or self.model, job.comm)

    def _step_schedule(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def _epoch_schedule(self, metrics: dict[str, float]) -> None:
        if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(metrics["loss"])
        else:
            self._step_schedule()


def _numbered(callbacks: Sequence[Callback]) -> dict[str, Any]:
    return {f"callback {number}": callback for number, callback in enumerate(callbacks)}


def _that_travel(items: dict[str, Any]) -> dict[str, Any]:
    """Those with state that a worker that joins can take over."""
    return {
        name: item for name, item in items.items() if hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
    }


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    for name, item in state.items():
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise SetupError(
                f"state[{name!r}] is a {type(item).__name__} without state_dict and load_state_dict",
                do="give it both methods: the first returns what is to be saved, the second takes it back",
            )
    return {f"own {name}": item for name, item in state.items()}


def as_data(value: Any) -> Data:
    return value if isinstance(value, Data) else Data(value)


def split_batch(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise SetupError(
        f"a batch is {describe(batch)}, not a pair (inputs, targets)",
        do="let the dataset return (input, target), or pass objective=lambda model, batch: ... instead of loss",
    )


def describe(batch: Any) -> str:
    """``[float32 (64, 1, 28, 28), int64 (64,)]``"""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, list | tuple):
        return "[" + ", ".join(map(describe, batch)) + "]"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in batch.items()) + "}"
    return type(batch).__name__


def _too_small_for_batch_norm(batch: Any) -> SetupError:
    return SetupError(
        f"batch norm has statistics to take from a microbatch of one sample, {describe(batch)}",
        cause="the batch, or the epoch's short last batch, is cut into as many microbatches as it has samples",
        do='Data(..., drop_last=True), a larger batch_size, fewer microbatches, or batch_norm="synchronised"',
    )


def _does_not_fit(error: Exception, batch: Any) -> ModelMismatch:
    return ModelMismatch(
        f"{type(error).__name__}: {error}",
        where=process.user_line(error),
        cause=f"the model or the loss does not fit the first batch, {describe(batch)}",
        do="compare that shape and dtype with what the model and the loss expect",
    )
