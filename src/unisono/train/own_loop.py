# SPDX-License-Identifier: Apache-2.0
"""For users who keep their own loop: `attach` makes a plain PyTorch loop exact and distributed in five lines.

The loader yields this worker's microbatches; `backward` and `step` stand where ``loss.backward()`` and
``optimizer.step()`` stood. The machinery is that of the trainer; only the loop is the user's.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from unisono.core import events, process, seeds
from unisono.core.errors import PeerLost, SetupError
from unisono.data.loading import Data, open_loader
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.strategy import Microbatch, Reduced
from unisono.train import context as contexts
from unisono.train.checkpoints import Riders
from unisono.train.finish import finish
from unisono.train.guard import ComputeAgain
from unisono.train.job import Job, Request
from unisono.train.loop import Loaded, current_lr, report_step
from unisono.train.moving import to_device
from unisono.train.noise_told import observe_noise
from unisono.train.nonfinite import check_finite
from unisono.train.notes import STOPPED_BY_RUN, Notes
from unisono.train.opening import open_job
from unisono.train.options import Clip, Result


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    clip: Clip | None = None,
    microbatches: int | None = None,
    exact: bool = True,
    travels: Mapping[str, Any] | None = None,
) -> tuple[OwnLoop, OwnLoader]:
    """Bind a model, its optimizer and a torch DataLoader to this run.

    Returns the run, with `backward`, `step` and `finish`, and the loader to iterate over instead. Dataset, batch size,
    shuffling, collate function and loader processes are taken over from `loader`; its batch size is the whole step's.
    What else the loop keeps and a worker that joins must have, such as ``{"schedule": scheduler}``, is named in
    `travels`: objects with state_dict and load_state_dict.
    """
    context = contexts.current()
    context.begin_training()
    data, batch_size = _take_over(loader)
    request = Request(
        model, optimizer, data, batch_size, microbatches=microbatches, exact=exact, clip=clip, has_end=False,
        travellers=dict(travels or {}),
    )  # fmt: skip
    run = OwnLoop(open_job(context, request))
    return run, run.loader


def _take_over(loader: DataLoader[Any]) -> tuple[Data, int]:
    if not isinstance(loader, DataLoader):
        raise SetupError(f"attach needs a torch DataLoader, not {type(loader).__name__}")
    if loader.batch_size is None:
        raise SetupError(
            "the DataLoader has no batch_size", do="give it one; a batch sampler of your own cannot be split"
        )
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and loader.sampler.num_samples == len(loader.sampler)
        and len(loader.sampler) == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not iterable and not plain:
        raise SetupError(
            f"the DataLoader has a {type(loader.sampler).__name__}",
            cause="Unisono decides the order of samples, so that it is the same on any number of workers",
            do="use shuffle=True or shuffle=False and no sampler",
        )
    if loader.worker_init_fn is not None or (loader.generator is not None and loader.num_workers):
        raise SetupError(
            "the DataLoader has a worker_init_fn or a generator of its own",
            cause="Unisono seeds every microbatch itself, so that randomness does not depend on who reads it",
            do="leave both out",
        )
    data = Data(
        loader.dataset,
        shuffle=not iterable and isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
        loader_processes=loader.num_workers,
        prefetch=loader.prefetch_factor,
        collate=loader.collate_fn if loader.collate_fn is not torch.utils.data.default_collate else None,
    )
    return data, loader.batch_size


class OwnLoader:
    """Iterate once per epoch; yields this worker's microbatches of every step."""

    def __init__(self, run: OwnLoop) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return self._run.microbatches()


class OwnLoop:
    """The user's side of a run. `loss` is the whole step's after `step` returned True."""

    def __init__(self, job: Job) -> None:
        self.job, self.state, self.loader = job, job.state, OwnLoader(self)
        assert isinstance(job.strategy, AllReduce)  # the only kind that can be done in the user's own pieces
        self._strategy = job.strategy
        self.loss = math.nan
        self._started_s = time.perf_counter()
        self._step_started_s = 0.0
        self._pending: Reduced | None = None
        self._due: Literal["nothing", "a backward pass", "a backward pass for show"] = "nothing"
        self._left_over: list[Microbatch] = []  # empty microbatches behind the last one with samples
        self._index = 0  # of the microbatch in hand
        self._handed_over: dict[int, tuple[CodeType, int]] = {}  # microbatch: where its loss was given to us
        self._loaded: Loaded | None = None
        self._last_batch: Any = None
        self._left_inside_a_step = False
        self._iterations = 0  # over the loader
        self._start_over = False  # the membership has changed: the step in hand is dealt out anew
        self._riders: list[Riders] = []  # what all have said about checkpoints with the last step
        self._change_due = False  # all have agreed to re-form, as soon as the script is through with the step
        self._copied: dict[str, Any] | None = None  # state of others, from an epoch that the script is yet to come to
        if job.position:
            self._keep_copy()

    @property
    def is_first_worker(self) -> bool:
        return self.job.is_first

    def microbatches(self) -> Iterator[Any]:
        """One epoch, microbatch by microbatch; each starts from its own random state and from the step's buffers."""
        self._refuse_half_steps()
        epoch, self._iterations = self._iterations, self._iterations + 1
        if epoch < self.state.epoch or self.state.stopped_early:
            return  # done before this worker joined, or the run is to end
        self.job.request.model.train()
        self._put_copy_back()
        try:
            while self.state.epoch == epoch:
                yield from self._rest_of_epoch()
                if not self._start_over:
                    break
        finally:
            if self.state.epoch == epoch:
                self.state.next_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        """From where the run stands to the epoch's end, or to where the membership changes."""
        job, state, self._start_over = self.job, self.state, False
        if self._change_due:  # the script left the last epoch at the step that was to be followed by it
            self._reform(None)
            return
        try:
            job.session.activity.step = state.step
            job.session.activity.now(f"checking the data of epoch {state.epoch + 1}")
            job.check_data(state.epoch)
        except PeerLost as lost:
            self._reform(lost)
            return
        source = job.loader.epoch(state.epoch, state.step_in_epoch, job.session.mine)
        while not (self._start_over or state.stopped_early):
            self._step_started_s = time.perf_counter()
            job.session.activity.step = state.step
            job.session.activity.now("reading data")
            job.faults.step = state.step + 1
            job.faults.reach("data")
            data = next(source, None)
            if data is None:
                return
            batches = [to_device(batch, job) for batch in data.batches]
            self._loaded = Loaded(data, batches, time.perf_counter() - self._step_started_s)
            yield from self._one_step(self._loaded)

    def _reform(self, lost: PeerLost | None) -> None:
        self.job.reform(lost)
        self._deal_again()
        self._change_due = False
        if self.state.epoch >= self._iterations:
            self._keep_copy()

    def _deal_again(self) -> None:
        self._pending, self._due, self._left_inside_a_step, self._start_over = None, "nothing", False, True

    def _keep_copy(self) -> None:
        """The script will still do here what it does behind an epoch, and the others have done it: a schedule's step,
        say. So that it does not count twice, the state is put back where the script catches up with the run."""
        self._copied = copy.deepcopy(self.job.state_out())

    def _put_copy_back(self) -> None:
        if self._copied is not None:
            self.job.state_in(self._copied)
            self._copied = None

    def _one_step(self, loaded: Loaded) -> Iterator[Any]:
        job = self.job
        weights = job.weights(loaded.step, loaded.batches)
        self._strategy.begin_step(weights)
        self._compute_started_s = time.perf_counter()
        with job.session.step(self.state.step) as attempt:
            mine = [Microbatch(attempt.step, index, weights[index]) for index in attempt.mine]
        job.session.activity.now("computing")
        # Samples are dealt out from the front, so microbatches without samples are the last ones.
        full = [
            (microbatch, batch) for microbatch, batch in zip(mine, loaded.batches, strict=True) if batch is not None
        ]
        self._left_over = mine[len(full) :]
        self._left_inside_a_step = True
        for position, (microbatch, batch) in enumerate(full):
            job.faults.reach("forward")
            self._strategy.begin_microbatch(microbatch)
            self._index, self._is_last = microbatch.index, position == len(full) - 1
            self._due, self._last_batch = "a backward pass", batch
            yield batch
            self._refuse_missing_calls()
            if self._start_over:
                return
        if not full:
            yield from self._go_through_the_motions()
        self._left_inside_a_step = False
        self._save_if_wanted()
        if self._change_due:
            self._reform(None)

    def _save_if_wanted(self) -> None:
        """Here and not in `step`: what the script does after it, such as a schedule's step, belongs to the state."""
        rows, self._riders = self._riders, []
        if rows:
            self.job.save_if_wanted(rows, is_last=bool(self.state.stopped_early), lasts=False)

    def _go_through_the_motions(self) -> Iterator[Any]:
        """A step in which this worker has no samples: the script gets its last batch once more and nothing comes of
        it, so that ``run.step()``, and whatever the script does after it, happens on every worker equally often."""
        if self._last_batch is None:  # its very first step here
            self._last_batch = self._any_batch()
        self._due, self._is_last = "a backward pass for show", True
        yield self._last_batch
        self._refuse_missing_calls()

    def _any_batch(self) -> Any:
        """The step's first microbatch, which has samples if any has; read without disturbing the loader processes."""
        job = self.job
        data = dataclasses.replace(job.request.data, loader_processes=0, prefetch=None)
        loader = open_loader(data, job.spec.batch_size, job.spec.microbatches, job.spec.seed)
        step = next(loader.epoch(self.state.epoch, self.state.step_in_epoch, range(1)))
        return to_device(next(iter(step.batches)), job)

    def _refuse_missing_calls(self) -> None:
        """Each worker's part of a step is needed by all: whoever leaves something out must hear of it at once."""
        missing = "run.backward(loss)" if self._due != "nothing" else "run.step()" if self._pending is not None else ""
        if missing:
            raise SetupError(
                f"step {self.state.step + 1}: a batch was taken and {missing} was not called for it",
                cause="the other workers wait for this one's part of the step",
                do="call run.backward(loss), then run.step(), once for every batch; no continue in front of them",
            )

    def _refuse_half_steps(self) -> None:
        if self._left_inside_a_step:
            raise SetupError(
                f"the loop was left in the middle of step {self.state.step + 1}",
                cause="one step is several microbatches, of which each worker has its own",
                do="break only after run.step() returned True",
            )

    def backward(self, loss: Tensor) -> None:
        """Instead of ``loss.backward()``. `loss` is the mean over the batch."""
        due, self._due = self._due, "nothing"
        if due == "nothing":
            raise SetupError("run.backward(loss) was called twice for one batch", do="add the losses, call it once")
        if due == "a backward pass":
            caller = sys._getframe(1)
            self._handed_over[self._index] = caller.f_code, caller.f_lineno
            self._strategy.backward(loss)
        else:
            self._strategy.forget_forward_pass()
        if not self._is_last:
            return
        for microbatch in self._left_over:
            self._strategy.begin_microbatch(microbatch)
            self._strategy.end_empty_microbatch()
        try:
            self._reduce(self._compute_started_s)
        except PeerLost as lost:  # nothing of this step has happened; the loader deals it out again
            self._reform(lost)
        except ComputeAgain:
            self._deal_again()

    def _reduce(self, started: float) -> None:
        assert self._loaded is not None
        session = self.job.session
        self.job.faults.stretch(time.perf_counter() - started)
        compute_s = time.perf_counter() - started
        session.activity.measured(compute_s, len(session.mine))
        session.activity.now("adding up the gradients")
        stop = STOPPED_BY_RUN if self.job.stop_is_asked() else 0.0
        notes = Notes(
            self._loaded.waited_s,
            compute_s + self.job.update_s,
            0.0,
            stop,
            self._loaded.step.check,
            session.wants_change,
            self.job.guard.due(self.state.step, self.job.comm.size),
            *self.job.checkpoints.riders(self.state.step + 1, self.job.is_first),
        )
        reduced = self._strategy.reduce(list(map(float, notes)))
        rows = [Notes(*row) for row in reduced.notes]
        self.job.check_stream(self.state.step + 1, [row.check for row in rows])
        self.job.compare_replicas(self.state.step, [row.checksum for row in rows])
        check_finite(self.job, reduced, self.state.step, self._line_of)
        self._pending = reduced

    def _line_of(self, microbatch: int) -> str:
        code, line = self._handed_over[microbatch]
        return process.line_at(code.co_filename, line, code.co_name)

    def step(self) -> bool:
        """Instead of ``optimizer.step()``. Updates after the step's last microbatch, and says whether it did."""
        if self._pending is None:
            return False
        try:
            self._apply()
        except PeerLost as lost:  # while weights came from servers: the step is done again, or taken from the others
            self._reform(lost)
            return False
        return True

    def _apply(self) -> None:
        reduced, self._pending = self._pending, None
        assert reduced is not None
        assert self._loaded is not None
        lr = current_lr(self.job)
        self.job.faults.reach("update")
        seeds.apply(seeds.derive(self.job.spec.seed, "update", self.state.step))
        update_started = time.perf_counter()
        self.job.checkpoints.await_copy()
        self._strategy.step(reduced.loss, _no_closure)
        self.job.update_s = time.perf_counter() - update_started
        self.loss = reduced.loss
        self._left_inside_a_step = False
        self.state.advance(reduced.loss, sum(self._loaded.step.counts))
        rows = [Notes(*row) for row in reduced.notes]
        if any(row.stop for row in rows):
            self.state.stopped_early = self.job.session.station.stop_because or "the run was asked to stop"
            self.state.stopped_by_run = True
        noise = observe_noise(self.state, self.job.spec.batch_size, reduced, sum(self._loaded.step.counts))
        report_step(self.job, self.state, reduced, lr, time.perf_counter() - self._step_started_s, noise)
        # Later: what the script does after this step, such as a schedule's step, belongs to the state that travels.
        self._change_due = any(row.change for row in rows) and not self.state.stopped_early
        self._riders = [row.riders for row in rows]

    def finish(self, **metrics: float) -> Result:
        """Instead of the end of the script: hash and save the weights, write the result with your `metrics`."""
        self._refuse_half_steps()
        self._put_copy_back()
        metrics = {name: float(value) for name, value in metrics.items()}
        if {"step", "epoch"} & set(metrics):
            raise SetupError("metrics may not be called step or epoch: those names are taken")
        if metrics:
            self.state.history.append({"step": self.state.step, "epoch": self.state.epoch, **metrics})
            self.job.emit(events.Evaluated(step=self.state.step, epoch=self.state.epoch, metrics=metrics, seconds=0.0))
        try:
            return finish(self.job, time.perf_counter() - self._started_s)
        finally:
            self.job.close()
            self.job.context.close()


def _no_closure() -> float:
    raise SetupError("LBFGS evaluates a step several times, which only unisono.Trainer can do")
