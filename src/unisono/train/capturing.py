# SPDX-License-Identifier: Apache-2.0
"""A job's state on its way into a checkpoint, and back out of one. Called by the job's checkpoints and by `opening`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from unisono.checkpoint.naming import by_name, by_number, names_in_order
from unisono.checkpoint.specs import TensorSpec, specs_of
from unisono.core import events
from unisono.train.resuming import (
    Home,
    TakenUp,
    believed,
    captured,
    captured_carried,
    carried_in,
    check_own,
    load,
)
from unisono.train.saving import Captured

if TYPE_CHECKING:
    from unisono.train.job import Job


def capture(job: Job) -> Captured:
    """What a checkpoint holds: the state by name, and the facts that say what it is the state of."""
    state = job.state_out()
    del state["strategy"]
    inner = job.strategy.gathered_state()
    del state["carried"]  # generations belong to this life of the run
    if job.state.stopped_by_run:  # which the state is not part of
        state["train"] |= {"stopped_early": "", "stopped_by_run": False}
    if job.spread is None:
        optimizer = by_name(inner["optimizer"], names_in_order(job.request.model, job.request.optimizer))
    else:
        inner, optimizer = {"model": job.spread.weights()}, job.spread.optimizer_by_name()
        state |= job.spread.whole.as_before
    tensors, facts, steady = captured({**inner, "optimizer": optimizer, **state}, job.request.model)
    last = job.state.history[-1] if job.state.history else {}
    about = {
        "run": job.context.spec.model_dump(mode="json"),
        "job": job.spec.model_dump(mode="json"),
        "fingerprint": job.fingerprint.model_dump(mode="json"),
        "cursor": {"epoch": job.state.epoch, "step_in_epoch": job.state.step_in_epoch},
        "samples": job.state.samples,
        "metrics": {key: value for key, value in last.items() if key not in ("step", "epoch")},
    }
    own, held = captured_carried(job.carried, job.spread)
    return Captured({**tensors, **own}, events.plain({**facts, **about}), {*steady, *own}, held)


def take_up(job: Job, home: Home) -> TakenUp:
    """Go on from a checkpoint. The workers have not met yet."""
    keep = {} if job.spread is None else {"keep": job.spread.keep}
    taken = load(home, _shapes(job), job.spec, job.fingerprint, job.carried, **keep)
    names = names_in_order(job.request.model, job.request.optimizer)
    with believed(taken.manifest, home.store.url if home.store else ""):
        state = dict(taken.state) if job.spread is None else job.spread.cut(taken.state)
        strategy = {key: state.pop(key) for key in ("model", "optimizer", "outer", "owed") if key in state}
        if job.spread is None:
            strategy["optimizer"] = by_number(strategy["optimizer"], names)
        check_own(job.request.travellers, state["travellers"])
        job.state_in({**state, "strategy": strategy, "carried": [taken.manifest.step, 0]})
        if job.state.step != taken.manifest.step:
            raise ValueError(f"its state is that of step {job.state.step}")
    read, words = carried_in(home, taken.manifest, job.carried, job.spec, job.spread)
    job.carried.begin_from(taken.manifest.step, read)
    if words:
        job.untold.append(
            events.Notice(code="carried-anew" if job.carried.is_active else "carried-ignored", text=words)
        )
    job.state.news = []  # they are in the record
    job.told = job.checkpoints.saved_step = job.state.step
    job.session.activity.step = 0  # until the workers have met, nobody stands anywhere
    return replace(taken, state=None)  # it is in the job now, and would stay here a second time


def _shapes(job: Job) -> Mapping[str, TensorSpec]:
    if job.spread is not None:
        return job.spread.whole.shapes
    state = job.request.model.state_dict()
    return specs_of({f"model.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)})
